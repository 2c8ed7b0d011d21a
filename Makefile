# make demo | serve | test | test-fast | bench | lint | venv | native | clean  (README.md tells what each does)
#
#   HTTP_PORT, GRPC_PORT, METRICS_PORT   where the server listens; two servers need different ones
#   ADDRESS                              0.0.0.0 to be reached from other machines
#   CHECKPOINT                           directory of a bf16 or an NVFP4 checkpoint
#   PYTHON                               interpreter for .venv (3.10 to 3.12)
#   BENCH, PEERS                         where the benchmark's checkpoints and other engines lie
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
ADDRESS ?= 127.0.0.1
CHECKPOINT ?= build/demo/checkpoint
PYTHON ?=
PYTEST_ARGS ?=
BENCH ?= .cache/bench
PEERS ?= .cache/peers
BENCH_ARGS ?=

RUN := .venv/bin/python
SERVER_ARGS = --http-port '$(HTTP_PORT)' --grpc-port '$(GRPC_PORT)' --metrics-port '$(METRICS_PORT)' \
	--address '$(ADDRESS)' --checkpoint '$(CHECKPOINT)'

.PHONY: demo serve test test-fast test-server bench lint venv native clean
.NOTPARALLEL:

demo: venv native
	@$(RUN) -m build.demo_run $(SERVER_ARGS)

serve: venv native
	@$(RUN) -m build.serve $(SERVER_ARGS)

# Random schedules of the engine against solo runs: more of them where all tests run.
NUM_SCHEDULES = 100
test: NUM_SCHEDULES = 500
test: test-fast test-server

# Two processes of one thread each beat one of two: the tests are too small for threads.
test-fast test-server: export OMP_NUM_THREADS = 1
test-fast: venv native
	$(RUN) -m pytest -m "not server" -n 2 --schedules $(NUM_SCHEDULES) $(PYTEST_ARGS)

test-server: venv native
	$(RUN) -m pytest -m server $(PYTEST_ARGS)

# Peers that are not set up (perf/peers/*.sh) are left out, and named.
bench: venv native | $(BENCH)/344m-bf16 $(BENCH)/344m-nvfp4 $(BENCH)/35b-4layers-nvfp4
	@if [ -x '$(PEERS)/llama_cpp/bin/llama-quantize' ]; then $(RUN) -m perf.peers.gguf \
	    --checkpoint '$(BENCH)/344m-bf16' --quantised '$(BENCH)/344m-nvfp4' --peers-directory '$(PEERS)'; fi
	$(RUN) -m perf.report --checkpoint '$(BENCH)/344m-bf16' --quantised '$(BENCH)/344m-nvfp4' \
	    --wide '$(BENCH)/35b-4layers-nvfp4' --peers-directory '$(PEERS)' $(BENCH_ARGS)

$(BENCH)/344m-bf16: | venv
	$(RUN) -m build.synthetic --shape 344m --layout bf16 --output $@
$(BENCH)/344m-nvfp4: | venv
	$(RUN) -m build.synthetic --shape 344m --layout nvfp4 --nvfp4-head --round-dense --output $@
$(BENCH)/35b-4layers-nvfp4: | venv
	$(RUN) -m build.synthetic --shape 35b --layers 4 --layout nvfp4 --nvfp4-head --output $@

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

venv:
	@build/venv.sh $(if $(PYTHON),'$(PYTHON)')

# Without a compiler the torch reference serves, with a warning.
native: venv
	-@$(RUN) -m build.native

# Keeps .venv and the state of a training run (.cache/demo-train).
clean:
	rm -rf .cache/backends .cache/checkpoints .cache/native .cache/logs .cache/run .cache/setuptools
	rm -rf .pytest_cache .ruff_cache .hypothesis model_repository/llm/1/checkpoint
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
