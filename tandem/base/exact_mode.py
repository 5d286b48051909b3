"""The numerical mode of ``trainer.exact`` as environment variables, which a process reads at its first product.

Outside it, products of MKL round by where a tensor happens to lie in memory (one row at a time does, on processors that
are not Intel's), and two runs of equal operations were seen to differ on processors with AVX-512.
"""

from __future__ import annotations

import os
import platform

MKL = "MKL_CBWR"
ATEN = "ATEN_CPU_CAPABILITY"
SETTING = {MKL: "AVX2,STRICT", ATEN: "avx2"}


def ask_for_exact_mode() -> None:
    """Set the mode for this process, if no product came before, and for those that it starts."""
    os.environ[MKL] = SETTING[MKL]
    if platform.machine().lower() in ("x86_64", "amd64") and os.environ.get(ATEN) != "default":
        os.environ[ATEN] = SETTING[ATEN]
