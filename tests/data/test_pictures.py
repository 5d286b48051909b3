"""Images of rows: every form they come in, the budget, and what is said of a broken or missing one."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tandem.base.errors import DataError
from tandem.columns.images import Images
from tandem.data.examples import ExampleColumns, encode_shown
from tandem.data.pictures import Budget, Picture, Sight
from tandem.data.rows import Row, RowError
from tandem.data.shown import with_images

TOKEN = 9


class Reader:
    """An image processor with one token for each 4 × 4 pixels."""

    image_token = TOKEN

    def tokens(self, size: tuple[int, int]) -> int:
        return size[0] * size[1] // 16

    def patches(self, pictures: Any) -> Images:
        raise AssertionError("nothing is drawn here")


def sight(column: str | None = "images", pixels: int = 1000, size: int = 10_000) -> Sight:
    return Sight(Reader(), Budget(pixels, size), column)  # type: ignore[arg-type]


def png(width: int = 8, height: int = 4, shade: int = 0) -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.full((height, width), shade, np.uint8)).save(written, "PNG")
    return written.getvalue()


FORMS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda folder: png(),
    "path": lambda folder: "a.png",
    "file url": lambda folder: f"file://{folder / 'a.png'}",
    "data url": lambda folder: "data:image/png;base64," + base64.b64encode(png()).decode(),
    "bytes of datasets": lambda folder: {"bytes": png(), "path": None},
    "path of datasets": lambda folder: {"bytes": None, "path": "a.png"},
    "pillow": lambda folder: Image.open(io.BytesIO(png())),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_is_the_same_image(tmp_path: Path, form: Callable[[Path], object]) -> None:
    (tmp_path / "a.png").write_bytes(png())
    found = sight().picture(form(tmp_path), tmp_path)
    assert found.size == (4, 8) and sight().tokens(found) == 2
    image = found.decoded()
    assert image.mode == "RGB" and image.size == (8, 4)


BROKEN: list[tuple[object, str]] = [
    ("gone.png", "can't be read"),
    (b"no image", "can't be decoded"),
    (png()[:-20], "can't be decoded"),
    ("data:image/png;base64,###", "not base64"),
    ("data:image/png,abc", "no base64 data URL"),
    ("https://example.org/a.png", "nothing is downloaded"),
    ({"bytes": None, "path": None}, "without bytes and without a path"),
    (7, "an image is a int"),
    (png(100, 100), "larger than data.image_max_pixels = 1000"),
    (b"x" * 10_001, "larger than data.image_max_bytes = 10000"),
]


@pytest.mark.parametrize(("value", "said"), BROKEN, ids=[said for _, said in BROKEN])
def test_a_broken_image_is_an_error_with_file_and_row(tmp_path: Path, value: object, said: str) -> None:
    row = Row(str(tmp_path / "rows.jsonl"), 3, {"images": [value]})
    with pytest.raises(RowError, match=said) as error:
        with_images(sight(), row, [{"role": "user", "content": "What?"}])
    assert f"{row.table}, row 3: " in str(error.value) and error.value.reason == "broken image"


def test_an_animation_is_no_image(tmp_path: Path) -> None:
    written = io.BytesIO()
    frames = [Image.fromarray(np.full((4, 4), shade, np.uint8)) for shade in (0, 255)]
    frames[0].save(written, "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match="2 frames"):
        sight().picture(written.getvalue(), tmp_path)


def test_a_file_that_changes_after_it_was_checked_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    found = sight().picture("a.png", tmp_path)
    (tmp_path / "a.png").write_bytes(png(shade=9))
    with pytest.raises(DataError, match="another one than when the run began"):
        found.decoded()


PLACE = {"type": "image"}


def placed(column: object, content: object, **more: Any) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    row = Row("rows.jsonl", 1, {"images": column})
    return with_images(sight(), row, [{"role": "user", "content": content, **more}])


def test_images_stand_where_the_text_or_the_parts_say_so() -> None:
    two = [png(), png(8, 8)]
    marked, pictures = placed(two, "a<image>b<image>")
    text = [{"type": "text", "text": one} for one in "ab"]
    assert marked[0]["content"] == [text[0], PLACE, text[1], PLACE]
    assert [picture.size for picture in pictures] == [(4, 8), (8, 8)]
    first, _ = placed(two, "a")
    assert first[0]["content"] == [PLACE, PLACE, text[0]]
    bare, _ = placed(two, [PLACE, text[0], PLACE])
    assert bare[0]["content"] == [PLACE, text[0], PLACE]
    own, pictures = placed([png(8, 8)], [{"type": "image", "image": png()}, PLACE])
    assert own[0]["content"] == [PLACE, PLACE] and [picture.size for picture in pictures] == [(4, 8), (8, 8)]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()}}
    assert placed(None, [url])[1][0].size == (4, 8)


def test_a_text_that_mentions_the_mark_stays_where_there_is_no_image() -> None:
    assert placed(None, "write <image>") == ([{"role": "user", "content": "write <image>"}], ())


@pytest.mark.parametrize("content", ["a<image>", [PLACE, PLACE, PLACE], [{"type": "image", "image": png()}, PLACE]])
def test_another_number_of_places_is_refused(content: object) -> None:
    with pytest.raises(DataError, match="the messages have places for"):
        placed([png(), png()], content)


def test_an_image_of_a_plain_text_is_never_left_out() -> None:
    with pytest.raises(RowError, match="images belong to chat messages"):
        encode_shown(None, ExampleColumns(), Row("rows.jsonl", 1, {"images": [png()]}), sight())  # type: ignore[arg-type]


def test_one_token_of_an_image_becomes_as_many_as_it_has() -> None:
    picture = sight().picture(png(), Path())
    ids, mask = sight().expanded([1, TOKEN, 2, 3], [0, 0, 0, 1], [picture])
    assert (ids, mask) == ([1, TOKEN, TOKEN, 2, 3], [0, 0, 0, 0, 1])
    with pytest.raises(DataError, match="places for 1 images, and there are 2"):
        sight().expanded([TOKEN], [0], [picture, picture])
    with pytest.raises(DataError, match="after the first answer"):
        sight().expanded([1, TOKEN], [1, 0], [picture])
