"""The formats of original files: text, Excel, zip archives, Unix compress."""

import io
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unix_compress import compress

from skksivi.datasets._readers import read_numbers, uncompress

NUMBERS = np.array([1.5, -2, 3, 4e-3, 5, 6])


@pytest.mark.parametrize(
    "text",
    [
        "1.5 -2 3\n4e-3 5 6\n",
        "  1.5\t-2   3\n\n 4e-3  5 6 \n\n",
        "a,b,c\r\n1.5,-2,3\r\n4e-3,5,6\r\n",
        "\ufeffa,b,c\r\n1.5,-2,3\r\n4e-3,5,6",
        '"the first";"2";"c"\n1.5;-2;3\n4e-3;5;6\n',
        "A text of 1978,\n\nthen 1 2 3:\n 1.5 -2\n 3\n 4e-3 5\n 6\n",
    ],
)
def test_text_in_every_layout(text):
    np.testing.assert_array_equal(read_numbers("a.data", text.encode(), ()), NUMBERS)


def test_a_word_among_the_numbers_is_an_error():
    with pytest.raises(ValueError, match="none"):
        read_numbers("a.csv", b"a,b\n1,2\n3,none\n", ())


def excel(rows, more=""):
    """Return a sheet as the least of an .xlsx file."""
    relation = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    main, packages = (
        f"http://schemas.openxmlformats.org/{part}/2006/{kind}"
        for part, kind in (("spreadsheetml", "main"), ("package", "relationships"))
    )
    types = packages.replace("relationships", "content-types")
    form = "application/vnd.openxmlformats-officedocument.spreadsheetml"

    def cell(value):
        return f"<c><v>{value!r}</v></c>" if isinstance(value, float) else f'<c t="str"><v>{value}</v></c>'

    sheet = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows) + more
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{types}"><Override PartName="/xl/workbook.xml" '
        f'ContentType="{form}.sheet.main+xml"/><Override PartName="/xl/worksheets/sheet1.xml" '
        f'ContentType="{form}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{packages}"><Relationship Id="r1" Type="{relation}/officeDocument" '
        'Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{relation}"><sheets><sheet name="Sheet1" sheetId="1" '
        'r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{packages}"><Relationship Id="r1" '
        f'Type="{relation}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>{sheet}</sheetData></worksheet>',
    }
    return archive({name: text.encode() for name, text in parts.items()}, zipfile.ZIP_DEFLATED)


def archive(files, method=zipfile.ZIP_STORED):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return packed.getvalue()


def test_the_first_sheet_of_an_excel_file():
    pytest.importorskip("python_calamine")
    content = excel([("a", "b", "c"), *NUMBERS.reshape(2, 3).tolist()])
    np.testing.assert_array_equal(read_numbers("a.xlsx", content, ()), NUMBERS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Cannot detect file format"),
        (excel([NUMBERS], '<row><c r="XFD1048576"><v>1</v></c></row>'), "its reader failed"),  # half a terabyte
        (excel([(f"{'x' * 40_000}", 1.0)]), "its first sheet is too large"),
    ],
)
def test_an_excel_file_that_cannot_be_read_is_refused(content, reason):
    pytest.importorskip("python_calamine")
    with pytest.raises(ValueError, match=f"it cannot be read as an Excel file: .*{reason}"):
        read_numbers("a.xlsx", content, (), 30_000)


@pytest.mark.parametrize("name", ["a.xls", "a.xlsx"])
def test_without_its_library_an_excel_file_is_refused_with_the_remedy(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    with pytest.raises(ImportError, match=rf"Reading '{name}' needs python-calamine: .*pip install"):
        read_numbers(name, b"", ())


def test_an_archive_gives_the_member_that_is_asked_for():
    content = archive({"CCPP/Readme.txt": b"1 2", "CCPP/b.csv": b"7", "CCPP/a.csv": b"1.5 -2 3 4e-3 5 6"})
    np.testing.assert_array_equal(read_numbers("the.zip", content, ("none.csv", "a.csv", "b.csv")), NUMBERS)
    packed = archive({"a.data.Z": compress(b"1.5 -2 3 4e-3 5 6")})
    np.testing.assert_array_equal(read_numbers("the.zip", packed, ("a.data", "a.data.Z")), NUMBERS)
    with pytest.raises(ValueError, match=r"none of its files \['Readme.txt', 'a.csv', 'b.csv'\]"):
        read_numbers("the.zip", content, ("c.csv",))


WORDS = st.lists(st.sampled_from([b"0.12,", b"-1.5,", b"aaaaaaa", b"\x00", b"3\n"]), max_size=2000).map(b"".join)


@given(content=st.binary(max_size=3000) | WORDS, width=st.integers(10, 16), clears=st.booleans())
def test_uncompress_undoes_compress(content, width, clears):
    assert uncompress(compress(content, width, clears)) == content


@given(content=st.binary(min_size=1, max_size=3000) | WORDS.filter(len))
def test_no_more_is_unpacked_than_is_allowed(content):
    packed = compress(content)
    assert uncompress(packed, len(content)) == content
    with pytest.raises(ValueError, match="it has more than"):
        uncompress(packed, len(content) - 1)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.Z", "a.zip"])
@pytest.mark.parametrize("n", [6, 400, 10_000])
def test_numbers_are_read_up_to_a_size(name, n):
    text = b"1 " * n
    packed = {"a.csv.Z": compress(text), "a.zip": archive({"a.csv": text}, zipfile.ZIP_DEFLATED)}
    content = packed.get(name, text)
    most = max(len(text), len(content))
    assert len(read_numbers(name, content, ("a.csv",), most)) == n
    with pytest.raises(ValueError, match="it has more than"):
        read_numbers(name, content, ("a.csv",), len(text) - 1)


@pytest.mark.parametrize(("width", "clears"), [(10, True), (12, False), (16, True)])
def test_uncompress_where_the_table_grows_full(width, clears):
    """Every width of codes is passed, and the table cleared, several times at the smaller widths."""
    content = np.random.RandomState(0).bytes(150_000)
    assert uncompress(compress(content, width, clears)) == content


def test_uncompress_reads_what_compress_wrote():
    """By hand: a, b, then the string ab, of which the first code of the table, 257, is made."""
    codes = [97, 98, 257]
    bits = sum(code << 9 * i for i, code in enumerate(codes))
    assert uncompress(bytes([0x1F, 0x9D, 0x90]) + bits.to_bytes(4, "little")) == b"abab"


@pytest.mark.parametrize("content", [b"", b"\x1f\x9d", b"\x1f\x8b\x90abc", bytes([0x1F, 0x9D, 0x80 | 31]), b"1 2 3"])
def test_uncompress_refuses_other_formats(content):
    with pytest.raises(ValueError, match="does not start"):
        uncompress(content)


def test_uncompress_refuses_codes_of_nothing():
    for codes in ([300], [97, 300]):
        bits = sum(code << 9 * i for i, code in enumerate(codes))
        with pytest.raises(ValueError, match="is undefined"):
            uncompress(bytes([0x1F, 0x9D, 0x90]) + bits.to_bytes(4, "little"))
