"""In-memory copies are a complete state after any death during a copy, and never contain a changed bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.fault_tolerance import memory_checkpoint
from fabricx.fault_tolerance.memory_checkpoint import Copies, Copy, Piece

MEMBERS = (4, 7)


def ranks(folder: Path) -> list[Copies]:
    for member in MEMBERS:
        for number in range(memory_checkpoint.NEWEST):
            memory_checkpoint.path_of(str(folder), member, number).touch()
    return [Copies(str(folder), member) for member in MEMBERS]


def whole(folder: Path) -> dict[Any, list[Copy]]:
    """Return the complete states by key, each as copies by rank."""
    return {
        key: [copies[rank] for rank in range(len(MEMBERS))]
        for (key, members), copies in memory_checkpoint.read(str(folder)).items()
        if len(copies) == len(MEMBERS)
    }


def state(value: float) -> dict[str, Any]:
    return {"weights": {"a": torch.full((3,), value), "odd": torch.ones(1, dtype=torch.bool)}, "step": int(value)}


def room(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def test_a_state_is_available_after_all_ranks_have_copied_it(tmp_path: Path) -> None:
    holder, other = ranks(tmp_path)
    assert memory_checkpoint.read(str(tmp_path)) == {}
    holder.make(1, MEMBERS, state(1.0))
    assert not whole(tmp_path)
    other.make(1, MEMBERS, state(10.0))
    holder.make(2, MEMBERS, state(2.0))
    [copies] = whole(tmp_path).values()
    assert [copy.key for copy in copies] == [1, 1]
    for rank, value in enumerate((1.0, 10.0)):
        joined = memory_checkpoint.join([copies[rank]], room)
        assert torch.equal(joined["weights"]["a"], torch.full((3,), value))
        assert joined["weights"]["odd"].dtype is torch.bool
        assert joined["step"] == int(value)


def test_a_death_during_a_copy_keeps_the_previous_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, other = ranks(tmp_path)
    for key in (1, 2):
        holder.make(key, MEMBERS, state(key))
        other.make(key, MEMBERS, state(key))
    with monkeypatch.context() as patch:
        patch.delattr(memory_checkpoint, "_sum")  # last in use
        with pytest.raises(NameError):
            holder.make(3, MEMBERS, state(3.0))
    assert list(whole(tmp_path)) == [2]
    holder.keep(2)
    holder.make(3, MEMBERS, {"more": torch.zeros(1000), **state(3.0)})  # larger than before
    other.make(3, MEMBERS, {"more": torch.zeros(1000), **state(3.0)})
    assert set(whole(tmp_path)) == {2, 3}


def test_a_later_process_keeps_the_copies_of_its_predecessor(tmp_path: Path) -> None:
    for key in (1, 2):
        for copies in ranks(tmp_path):
            copies.make(key, MEMBERS, state(key))
            copies.make(key, MEMBERS, state(key))
    later = ranks(tmp_path)
    for copies in later:
        copies.keep(2)
        copies.make(3, MEMBERS, state(3.0))
    assert set(whole(tmp_path)) == {2, 3}


def test_deleted_copies_are_removed_also_those_of_a_predecessor(tmp_path: Path) -> None:
    for copies in ranks(tmp_path):
        copies.make(1, MEMBERS, state(1.0))
    [later, _] = ranks(tmp_path)
    later.forget()
    assert not whole(tmp_path)
    later.make(2, MEMBERS, state(2.0))
    assert len(memory_checkpoint.read(str(tmp_path))[2, MEMBERS]) == 1


def test_a_copy_is_sent_in_blocks_and_is_invalid_until_complete(tmp_path: Path) -> None:
    holder, other = ranks(tmp_path)
    for number in range(memory_checkpoint.NEWEST):
        memory_checkpoint.path_of(str(tmp_path), 9, number).touch()
    buddy = Copies(str(tmp_path), -1, 9)
    holder.make(1, MEMBERS, state(1.0))
    other.make(1, MEMBERS, state(2.0))
    header, content = other.content()
    for number in range(memory_checkpoint.NEWEST):  # the machine is lost
        memory_checkpoint.path_of(str(tmp_path), MEMBERS[1], number).unlink()
    with buddy.taking(header) as buffer:
        buffer[:-8] = content[:-8]
        assert not whole(tmp_path)
        buffer[-8:] = content[-8:]
    [[_, copy]] = whole(tmp_path).values()
    assert copy.whole()
    assert torch.equal(memory_checkpoint.join([copy], room)["weights"]["a"], torch.full((3,), 2.0))


def test_a_changed_bit_is_detected(tmp_path: Path) -> None:
    holder, other = ranks(tmp_path)
    holder.make(1, MEMBERS, state(1.0))
    other.make(1, MEMBERS, state(1.0))
    [copies] = whole(tmp_path).values()
    assert all(copy.whole() for copy in copies)
    copies[1].memory[5] ^= 1
    assert [copy.whole() for copy in copies] == [True, False]
    path = memory_checkpoint.path_of(str(tmp_path), MEMBERS[0], 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # outside of the tensors
    path.write_bytes(content)
    assert not whole(tmp_path)


def blocks(*begins: int) -> list[Copy]:
    """Return copies of a matrix of seven rows; each copy ends where the next begins."""
    copies = []
    for begin, end in zip(begins, (*begins[1:], 7), strict=True):
        rows = torch.arange(14.0).view(7, 2)[begin:end].contiguous()
        piece = Piece(0, rows.shape, rows.dtype, (begin, 0), torch.Size((7, 2)))
        copies.append(Copy(1, (0,), 0, {"__tensor__": "m"}, {"m": piece}, rows.view(-1).view(torch.uint8), 0))
    return copies


@pytest.mark.parametrize("begins", [(0,), (0, 4), (0, 3, 6), (0, 3, 3, 7)])
def test_blocks_of_any_size_are_reassembled(begins: tuple[int, ...]) -> None:
    joined = memory_checkpoint.join(blocks(*begins), room)
    assert torch.equal(joined, torch.arange(14.0).view(7, 2))


def test_a_block_without_a_copy_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a part of m is in no in-memory checkpoint"):
        memory_checkpoint.join(blocks(0, 3, 5)[:2], room)
