"""What native code mirrors: orders and values that stay, and what csrc does without."""

from __future__ import annotations

import re

from package_tree import REPOSITORY

from loader.checkpoint.scheme import Role
from loader.pieces import DESCRIPTOR_FIELDS


def test_the_columns_of_a_descriptor_keep_their_order() -> None:
    assert DESCRIPTOR_FIELDS == (
        "role",
        "bank",
        "projection",
        "slot",
        "offset",
        "rows",
        "row_bytes",
        "skip",
        "cols",
        "dest_row",
        "expect_a",
        "expect_b",
    )


def test_the_roles_keep_their_values() -> None:
    assert {role.name: role.value for role in Role} == {
        "CODES_KN": 0,
        "CODES_NK": 1,
        "SCALES_GN": 2,
        "SCALES_NG": 3,
        "SCALES_NG8": 4,
        "ZEROS_GN": 5,
        "ZEROS_NG": 6,
        "GLOBAL_F32": 7,
        "GLOBAL_BF16": 8,
        "CHECK_SHAPE": 9,
        "CHECK_GROUPS": 10,
        "PLAIN_NK": 11,
        "UNUSED": 12,
        "SCALES_GN32": 13,
        "SCALES_NG32": 14,
    }


def test_native_code_reads_no_environment_and_meets_torch_in_one_place() -> None:
    """Holds for every file under ``csrc/``, of which there may be none yet."""
    for file in sorted((REPOSITORY / "csrc").rglob("*")):
        if file.suffix not in (".h", ".hpp", ".cuh", ".c", ".cc", ".cpp", ".cu"):
            continue
        text = file.read_text()
        assert "getenv" not in text, file
        if "torch" not in file.relative_to(REPOSITORY / "csrc").parts[:1]:
            assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10)/", text), file
