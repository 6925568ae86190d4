"""What is stored in some rectangles is read in any others, through few blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file
from torch import Tensor

from bigplan.errors import CheckpointError
from bigplan.mechanics import PAGE
from bigplan.rectangle import Rectangle, cut, whole
from bigplan.runtime.checkpoint import Manifest, Reader, reading, writing
from bigplan.runtime.checkpoint.layout import Image, LayerFile, Span, laid_out
from bigplan.runtime.manifest import ELEMENT, Extent, Kind, StoredFile, StoredTensor
from bigplan.runtime.memory.disk import Pages
from bigplan.runtime.memory.slab import aligned_empty
from tests.examples import examples
from tests.runtime.plans import tiny_model, tiny_training

LAYER, LAYERS = 1, ("embedding", "block", "head")
KINDS: tuple[Kind, ...] = ("exp_avg", "master")
Partition = tuple[Rectangle, ...]


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """Blocks of a page, so that small parameters are in several."""
    with mock.patch.object(reading, "BLOCK", PAGE), mock.patch.object(writing, "BLOCK", PAGE):
        yield


def _values(shape: Sequence[int], kind: Kind) -> Tensor:
    """Of a whole parameter, all different."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) + KINDS.index(kind) * count).to(torch.float32).view(shape)


def _matrix(shape: Sequence[int], kind: Kind) -> Tensor:
    return _values(shape, kind).view(1 if len(shape) == 1 else shape[0], -1)


def _spans(rectangles: Sequence[Rectangle], shape: tuple[int, ...]) -> Iterator[Span]:
    start = 0
    for kind in KINDS:
        for rectangle in rectangles:
            yield Span(rectangle, kind, shape, start)
            start += rectangle.elements


def _image(rectangles: Sequence[Rectangle], shape: tuple[int, ...], offset: int) -> Image:
    spans = tuple(_spans(rectangles, shape))
    length = max((span.stop for span in spans), default=0) * ELEMENT
    return Image(("o", 0), spans, length, offset)


def _stored(folder: Path, number: int, images: Sequence[Image]) -> StoredFile:
    """A file as a rank writes it; what is beside the images in their pages is noise."""
    file: LayerFile = laid_out(f"{number}.safetensors", LAYER, LAYERS, images)
    data = bytearray(b"\xff" * file.nbytes)
    data[: len(file.header)] = file.header
    extents = [(0, len(file.header))]
    for image, offset in zip(file.images, file.offsets, strict=True):
        for span in image.spans:
            at = offset + image.before + span.start * ELEMENT
            found = _matrix(span.shape, span.kind)[span.rectangle.in_matrix].contiguous()
            data[at : at + found.nbytes] = found.numpy().tobytes()
        extents.append((offset, image.nbytes))
    (folder / file.name).write_bytes(data)
    return StoredFile(
        name=file.name,
        layer=LAYER,
        nbytes=file.nbytes,
        extents=tuple(
            Extent(
                offset=offset,
                nbytes=nbytes,
                checksums=tuple(writing.block_sums(memoryview(data)[offset : offset + nbytes])),
            )
            for offset, nbytes in extents
        ),
        tensors=file.tensors,
    )


@contextmanager
def _written(
    shape: tuple[int, ...], files: Sequence[Sequence[Rectangle]], offset: int = 0
) -> Iterator[tuple[Path, Manifest]]:
    """A checkpoint of one parameter; each file has its rectangles as one image."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = tuple(
            _stored(folder, number, [_image(rectangles, shape, offset)])
            for number, rectangles in enumerate(files)
        )
        yield (
            folder,
            Manifest(
                step=1,
                model=tiny_model(),
                training=tiny_training(1),
                plan="",
                state={},
                files=stored,
            ),
        )


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Elements of every copy."""
    counts: list[int] = []
    copy = Tensor.copy_

    def counted(into: Tensor, source: Tensor) -> Tensor:
        counts.append(into.numel())
        return copy(into, source)

    with mock.patch.object(Tensor, "copy_", counted):
        yield counts


def _read(reader: Reader, kind: Kind, wanted: Rectangle) -> Tensor:
    into = torch.full((wanted.elements,), torch.nan)
    reader.read(LAYER, kind, wanted, into)
    return into.view(wanted.rows, wanted.columns)


# Narrow rows of which a block has many, and wide ones of which a part has blocks of its own.
shapes = st.one_of(
    st.tuples(st.integers(1, 5000)),
    st.tuples(st.integers(1, 300), st.integers(1, 20)),
    st.tuples(st.integers(1, 6), st.integers(1, 5000)),
    st.tuples(st.integers(1, 60), st.integers(1, 100)),
)


def _all(shape: Sequence[int]) -> Rectangle:
    return whole("w", *_matrix(shape, "master").shape)


@st.composite
def partitions(draw: st.DrawFn, shape: Sequence[int]) -> Partition:
    """A parameter cut by rows and columns, again and again."""
    parts = [_all(shape)]
    for _ in range(draw(st.integers(0, 6))):
        one = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if draw(st.booleans()):
            row = draw(st.integers(one.first_row, one.last_row))
            bounds = one.first_column, one.last_column
            cuts = [(one.first_row, row, *bounds), (row, one.last_row, *bounds)]
        else:
            column = draw(st.integers(one.first_column, one.last_column))
            rows = one.first_row, one.last_row
            cuts = [(*rows, one.first_column, column), (*rows, column, one.last_column)]
        parts += [Rectangle("w", *part) for part in cuts if part[0] < part[1] and part[2] < part[3]]
    return tuple(draw(st.permutations(parts)))


@st.composite
def ranges(draw: st.DrawFn, shape: Sequence[int]) -> tuple[Partition, ...]:
    """A parameter's elements dealt out to ranks in ranges, of which some may be empty."""
    every = _all(shape)
    bounds = sorted(draw(st.lists(st.integers(0, every.elements), max_size=5)))
    each = zip([0, *bounds], [*bounds, every.elements], strict=True)
    return tuple(tuple(cut("w", every.columns, low, high)) for low, high in each)


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int]) -> tuple[Partition, ...]:
    """Which rectangles are in which file."""
    if draw(st.booleans()):
        return draw(ranges(shape))
    parts = draw(partitions(shape))
    at = draw(st.integers(0, len(parts)))
    return parts[:at], parts[at:]


@given(
    shapes.flatmap(lambda shape: st.tuples(st.just(shape), layouts(shape), layouts(shape))),
    st.integers(0, 3000),
    st.integers(1, 3),
)
@settings(max_examples=examples(150), derandomize=True, deadline=None)
def test_what_is_stored_in_some_rectangles_is_read_in_others(
    case: tuple[tuple[int, ...], tuple[Partition, ...], tuple[Partition, ...]],
    offset: int,
    pages: int,
) -> None:
    shape, stored, wanted = case
    with (
        _written(shape, stored, offset * ELEMENT) as (path, manifest),
        Reader(path, manifest, aligned_empty(pages * PAGE)) as reader,
    ):
        for kind in KINDS:
            for rectangle in (one for rectangles in wanted for one in rectangles):
                expected = _matrix(shape, kind)[rectangle.in_matrix]
                assert torch.equal(_read(reader, kind, rectangle), expected)
        assert torch.equal(reader.parameter(LAYER, "w"), _values(shape, "master"))


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), layouts(shape))), st.integers(0, 999))
@settings(max_examples=examples(50), derandomize=True, deadline=None)
def test_other_tools_read_the_rectangles(
    case: tuple[tuple[int, ...], tuple[Partition, ...]], offset: int
) -> None:
    shape, stored = case
    with _written(shape, stored, offset * ELEMENT) as (path, manifest):
        for file, rectangles in zip(manifest.files, stored, strict=True):
            found = load_file(path / file.name)
            tensors = {name for name in found if not name.startswith("padding")}
            assert len(tensors) == len(KINDS) * len(rectangles)
            for name in tensors:
                title, kind, index = name.split("/")
                assert title == "layers.0.w"
                at = tuple(slice(*map(int, part.split(":"))) for part in index.split(","))
                values = next(_values(shape, one) for one in KINDS if one == kind)
                assert torch.equal(found[name], values[at])


@given(
    shapes.flatmap(lambda shape: st.tuples(st.just(shape), layouts(shape), partitions(shape))),
    st.booleans(),
)
@example(((4, 5000), ((whole("w", 4, 5000),),), (Rectangle("w", 1, 4, 1000, 1030),)), True)
@settings(max_examples=examples(50), derandomize=True, deadline=None)
def test_only_blocks_with_wanted_elements_are_read(
    case: tuple[tuple[int, ...], tuple[Partition, ...], Partition], roomy: bool
) -> None:
    shape, stored, (wanted, *_) = case
    blocks: set[tuple[str, int]] = set()
    move = Pages.move

    def noted(pages: Pages, offset: int, view: memoryview, *, write: bool) -> None:
        blocks.update((pages.path.name, offset + at) for at in range(0, len(view), PAGE))
        move(pages, offset, view, write=write)

    with (
        _written(shape, stored) as (path, manifest),
        Reader(path, manifest, aligned_empty((4 if roomy else 1) * PAGE)) as reader,
        mock.patch.object(Pages, "move", noted),
    ):
        _read(reader, "master", wanted)
        needed = {
            (file.name, at // PAGE * PAGE)
            for file in manifest.files
            for tensor in file.tensors
            if tensor.kind == "master"
            for at in _bytes(tensor, wanted)
        }
    assert blocks == needed


def _bytes(tensor: StoredTensor, wanted: Rectangle) -> Iterator[int]:
    """Where in its file the stored rectangle has elements of another, by going through them."""
    held = tensor.rectangle
    rows = range(held.first_row, held.last_row)
    columns = range(held.first_column, held.last_column)
    for number, row in enumerate(rows):
        if wanted.first_row <= row < wanted.last_row:
            first = tensor.offset + number * len(columns) * ELEMENT
            inside = (c for c in columns if wanted.first_column <= c < wanted.last_column)
            yield from (first + (column - held.first_column) * ELEMENT for column in inside)


@given(
    shapes.flatmap(
        lambda shape: st.tuples(
            st.just(shape), st.lists(partitions(shape), min_size=1, max_size=3), partitions(shape)
        )
    ),
    st.data(),
)
@settings(max_examples=examples(150), derandomize=True, deadline=None)
def test_rectangles_may_overlap_and_what_all_lack_is_told(
    case: tuple[tuple[int, ...], list[Partition], Partition], data: st.DataObject
) -> None:
    shape, layers, (wanted, *_) = case
    stored = [[one for one in parts if data.draw(st.booleans())] for parts in layers]
    held = torch.zeros(_matrix(shape, "master").shape, dtype=torch.bool)
    for one in (one for parts in stored for one in parts):
        held[one.in_matrix] = True
    lacking = (~held[wanted.in_matrix]).nonzero().tolist()
    expected = _matrix(shape, "master")[wanted.in_matrix]
    with _written(shape, stored) as (path, manifest), Reader(path, manifest) as reader:
        if not lacking:
            with _counted() as copies:
                assert torch.equal(_read(reader, "master", wanted), expected)
            assert sum(copies) == wanted.elements  # each once
            return
        row, column = lacking[0][0] + wanted.first_row, lacking[0][1] + wanted.first_column
        told = (
            f"lacks master of layer {LAYER}: {len(lacking)} elements of w, the first in "
            f"row {row}, column {column}; .*resume from another one"
        )
        with pytest.raises(CheckpointError, match=told):
            _read(reader, "master", wanted)


def test_what_is_not_stored_at_all_is_told() -> None:
    with _written((4, 3), [[whole("w", 4, 3)]]) as (path, manifest), Reader(path, manifest) as it:
        with pytest.raises(CheckpointError, match="lacks weights of layer 1: 12 elements of w"):
            _read(it, "weights", whole("w", 4, 3))
        with pytest.raises(CheckpointError, match="lacks weights of layer 1: all of v"):
            it.parameter(LAYER, "v")


def test_many_narrow_rows_are_few_copies() -> None:
    """Columns 3 to 5 of a thousand rows of 64: a row at a time would be a thousand."""
    wanted = Rectangle("w", 0, 1000, 3, 5)
    buffer = aligned_empty(16 * PAGE)
    with (
        _written((1000, 64), [[whole("w", 1000, 64)]]) as (path, manifest),
        Reader(path, manifest, buffer) as reader,
        _counted() as copies,
    ):
        found = _read(reader, "master", wanted)
    assert torch.equal(found, _matrix((1000, 64), "master")[wanted.in_matrix])
    fillings = -(-1000 * 64 * ELEMENT // buffer.numel()) + 1
    assert len(copies) <= 3 * fillings


def test_older_parts_of_experts_are_read_as_rows_of_all_side_by_side() -> None:
    """Their rows took turns: 12 rows of 3 experts are 4 rows of all of them."""
    model = tiny_model(experts=3, experts_per_token=1, ffn=4)
    name, shape = "experts.up_proj.weight", (12, model.hidden)
    parts = [*cut(name, model.hidden, 0, 130), *cut(name, model.hidden, 130, 12 * model.hidden)]
    with _written(shape, [parts[:1], parts[1:]]) as (path, manifest):
        older = manifest.model_copy(update={"model": model})
        with Reader(path, older) as reader:
            wanted = whole(name, 4, 3 * model.hidden)
            found = _read(reader, "master", wanted)
            assert torch.equal(found, _values(shape, "master").view(4, -1))
            assert torch.equal(reader.parameter(LAYER, name), _values(shape, "master"))
