// All kernels for one instruction set; compiled once for each, with its flags and QWEN35_ISA set to its name.
#include "attention.h"
#include "elementwise.h"
#include "gated_delta.h"
#include "moe.h"
#include "scan.h"

#define QWEN35_JOIN(a, b) a##b
#define QWEN35_NAME(isa) QWEN35_JOIN(kernels_, isa)
#define QWEN35_TEXT(isa) #isa
#define QWEN35_STRING(isa) QWEN35_TEXT(isa)

namespace qwen35 {

const Kernels QWEN35_NAME(QWEN35_ISA) = {
    QWEN35_STRING(QWEN35_ISA), QWEN35_ISA::linear,      QWEN35_ISA::experts, QWEN35_ISA::choose,      QWEN35_ISA::rms_norm,
    QWEN35_ISA::silu_mul,      QWEN35_ISA::sigmoid_mul, QWEN35_ISA::add_rows, QWEN35_ISA::rotate,  QWEN35_ISA::gated_delta, QWEN35_ISA::attention,
    QWEN35_ISA::scan_depths,   QWEN35_ISA::scan_between, QWEN35_ISA::scan_contenders,
};

}  // namespace qwen35
