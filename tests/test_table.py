"""Tables: columns line up, numbers are never broken, words wrap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loader.table import Table, human_bytes, merged_layers, render

WORD = st.text("abcdefgh-_.=", min_size=1, max_size=12)
SENTENCE = st.lists(WORD, min_size=1, max_size=8).map(" ".join)
NUMBER = st.integers(0, 10**9).map(lambda n: f"{n:,}") | st.floats(0, 1e14).map(human_bytes)
ROWS = st.lists(st.tuples(SENTENCE, NUMBER, NUMBER, SENTENCE), min_size=1, max_size=6)
COLUMNS = ("name", "size", "two\nlines", "reason")


def test_a_table_to_the_letter() -> None:
    rows = [("0-3", 12, "1.50 KiB", "a reason of words"), ("7", 3456, "0 B", "-")]
    table = Table("Title", ("layers", "H", "two\nlines", "reason"), rows, ("layers", "reason"))
    assert render("A line.", table, width=40) == "\n".join(
        [
            "A line.",
            "",
            "Title",
            "",
            "                   two",
            "layers     H     lines  reason",
            "────────────────────────────────────────",
            "0-3       12  1.50 KiB  a reason of",
            "                        words",
            "7       3456       0 B  -",
        ]
    )


@settings(deadline=None, max_examples=150)
@given(rows=ROWS, width=st.integers(20, 160))
def test_numbers_stand_whole_under_each_other_whatever_the_width(
    rows: list[tuple[str, str, str, str]], width: int
) -> None:
    text = render(Table("t", COLUMNS, rows, ("name", "reason")), width=width)
    lines = text.splitlines()
    rule = next(n for n, line in enumerate(lines) if set(line.strip()) == {"─"})
    body = lines[rule + 1 :]
    assert len(lines[rule]) == max(len(line) for line in lines[2:])
    found = [line for line in body if any(row[1] in line and row[2] in line for row in rows)]
    assert len(found) == len(rows)
    ends = set()
    for row, line in zip(rows, found, strict=True):
        end = line.index(row[1], len(row[0].split()[0])) + len(row[1])
        ends.add(end)
        assert line.index(row[2], end) > end
    assert len(ends) == 1
    for column in (0, 3):
        words = [word for row in rows for word in row[column].split()]
        joined = " ".join(body).split()
        assert width < 120 or all(word in joined for word in words)
    least = max(len(word) for row in rows for word in row[0].split() + ["name"])
    least += max(len(word) for row in rows for word in row[3].split() + ["reason"])
    least += max(len(row[1]) for row in rows + [("", "size", "", "")])
    least += max(len(row[2]) for row in rows + [("", "", "lines", "")]) + 1 + 3 * 2
    assert len(lines[rule]) <= max(width, least + 1)


def test_a_table_that_fits_does_not_wrap() -> None:
    rows = [("some words here", 1)]
    assert render(Table("t", ("a", "b"), rows, ("a",)), width=20).endswith("some words here  1")
    assert render(Table("t", ("a", "b"), rows, ("a",)), width=10).splitlines()[-3:] == [
        "some     1",
        "words",
        "here",
    ]


def test_empty_cells_and_empty_tables_draw() -> None:
    assert render(Table("t", ("", "n"), [("", 1), ("  of it", 20)], ("",))).splitlines()[-2:] == [
        "          1",
        "  of it  20",
    ]
    assert render(Table("t", ("a", "b"), [], ("a",))).splitlines() == ["t", "", "a  b", "────"]


def test_markup_is_text() -> None:
    assert "[red]x[/red] [1, 2]" in render(Table("t", ("a",), [("[red]x[/red] [1, 2]",)], ("a",)))


def test_paragraphs_wrap_at_words_and_keep_their_lines() -> None:
    assert render("one two three\n/a/very/long/path-of-a-file", width=9) == (
        "one two\nthree\n/a/very/long/path-of-a-file"
    )


def test_bytes_for_people() -> None:
    sizes = [None, 0, 1, 1023, 1024, 1536, 1 << 20, 943_718_400, 1 << 40, 1 << 53, -2048]
    assert [human_bytes(size) for size in sizes] == [
        "-",
        "0 B",
        "1 B",
        "1023 B",
        "1.00 KiB",
        "1.50 KiB",
        "1.00 MiB",
        "900.00 MiB",
        "1.00 TiB",
        "8192.00 TiB",
        "-2.00 KiB",
    ]


@settings(deadline=None)
@given(st.sets(st.integers(0, 60), max_size=30))
def test_merged_layers_name_each_layer_once(numbers: set[int]) -> None:
    text = merged_layers(sorted(numbers, reverse=True))
    found: list[int] = []
    for run in text.split(", ") if text else []:
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
        assert int(first) - 1 not in numbers and int(last or first) + 1 not in numbers
    assert found == sorted(numbers)


def test_merged_layers_read() -> None:
    assert merged_layers([2, 0, 1, 5, 8, 7]) == "0-2, 5, 7-8"
