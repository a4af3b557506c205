"""C code that PyTensor reads for operations that are never compiled as C here."""

from __future__ import annotations

from typing import Any

from pytensor.link.c.op import ExternalCOp


def read_once() -> None:
    """Have PyTensor read the C code of an operation once, and not for each of the thousands that a fit makes.

    PyTensor 3 reads none for them. Where looking a file up is slow, as in containers, a suite of many models gains.
    """
    read, known = ExternalCOp.load_c_code, {}

    def load_c_code(op: Any, files: Any) -> None:
        key = type(op), tuple(files)
        if key not in known:
            read(op, files)
            known[key] = list(op.func_codes), dict(op.code_sections)
        codes, sections = known[key]
        op.func_codes, op.code_sections = list(codes), dict(sections)

    ExternalCOp.load_c_code = load_c_code
