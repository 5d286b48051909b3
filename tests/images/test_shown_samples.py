"""What a person sees of images: small ones in samples/, in the report and on the page of ``tandem view``."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pyarrow.parquet as parquet
from PIL import Image

from tandem.models.vision.image_reader import PREVIEW, ImageReader
from tandem.observe.metrics import ROLLOUTS_FILE, RolloutLog, RolloutRecord
from tandem.observe.report import write_report
from tandem.observe.samples.parts import write_part
from tandem.observe.samples.table import sample_table
from tandem.view.samples import SampleIndex
from tests.images.folders import write_model
from tests.observe.sample_batches import scored


def opened(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))


def test_an_image_is_shown_small_and_whole(tmp_path: Path) -> None:
    reader = ImageReader(write_model(tmp_path / "model", "qwen2_5_vl"))
    read = reader.patches([Image.new("RGB", (16, 8), "red"), Image.new("RGB", (400, 200), "blue")])
    one, other = map(opened, read.urls)
    assert one.size == (16, 8) and one.getpixel((3, 3)) == (255, 0, 0)
    assert other.size == (PREVIEW, PREVIEW // 2) and other.getpixel((3, 3)) == (0, 0, 255)


def test_samples_keep_what_their_prompt_shows(tmp_path: Path) -> None:
    reader = ImageReader(write_model(tmp_path / "model", "qwen2_5_vl"))
    images = reader.patches([Image.new("RGB", (8, 8), "red")])
    batch = scored(["ab", "abc"], [1.0, 0.0])
    batch.non_tensor_batch["images"] = [images, None]
    part, _ = write_part(tmp_path, "train", 1, sample_table(batch, 1, "train"))
    assert parquet.read_table(part.path)["images"].to_pylist()[:2] == [images.urls, []]
    first = parquet.read_table(part.path).to_pylist()[0]
    found = SampleIndex(tmp_path).group("train", 1, first["group"])
    assert [row["images"] for row in found if row["sample"] == first["sample"]] == [images.urls]


def test_the_report_shows_the_images_of_its_samples(tmp_path: Path) -> None:
    url = "data:image/png;base64,aGk="
    log = RolloutLog(tmp_path)
    log.record(1, [RolloutRecord("what?", "7", 1.0, "7", 0, images=[url, 'javascript:"'])])
    log.record(2, [RolloutRecord("what?", "8", 0.0, "7", 0)])
    log.close()
    assert (tmp_path / ROLLOUTS_FILE).read_text().count('"images"') == 1
    page = write_report(tmp_path, config={}, summary={}).read_text()
    assert page.count("<img") == 1 and f'src="{url}"' in page and "javascript" not in page
