"""Arithmetic of the model behind one protocol, `ops.Ops`; `select.select_ops` chooses an implementation once."""
