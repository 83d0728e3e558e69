"""Coverage-guided fuzzing of the header reader by atheris, held against safetensors.

    python tests/fuzz/fuzz_coverage.py -max_total_time=60

The first byte of an input chooses: a structured file, or the rest of the bytes as they are.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["loader.checkpoint.header", "loader.checkpoint.entries"]):
    import loader.checkpoint.header  # noqa: F401 - imported to be instrumented

from fuzz_choices import ProvidedChoices  # noqa: E402 - after the instrumented import
from fuzz_files import make_file  # noqa: E402 - after the instrumented import
from fuzz_oracle import check_against_safetensors  # noqa: E402 - after the instrumented import


def one_input(data: bytes) -> None:
    """One input of the fuzzer; an assertion or any other exception ends the run."""
    if data[:1] < b"\x80":
        raw = make_file(ProvidedChoices(atheris.FuzzedDataProvider(data[1:])))
    else:
        text = data[1:]
        raw = len(text).to_bytes(8, "little") + text if len(data) % 2 else text
    check_against_safetensors(raw)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
