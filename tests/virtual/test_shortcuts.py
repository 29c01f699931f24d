"""Results of elementwise operators are those of torch's reference implementations, or are left to them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memlint.virtual import shortcuts  # noqa: E402

aten = torch.ops.aten


def tensor(*shape: int, dtype: Any = None, last: bool = False) -> Any:
    made = torch.empty(shape, dtype=dtype or torch.float32, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def looks(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [looks(each) for each in value]
    return None if value is None else (value.shape, value.dtype, value.stride())


ROWS = (tensor(8, 16), tensor(8, 16))
IMAGES = (tensor(2, 3, 8, 8, last=True), tensor(2, 3, 8, 8, last=True))
HALF = (tensor(8, 16, dtype=torch.float16), tensor(8, 16, dtype=torch.float16))
TAKEN: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((op.Tensor, pair, {}) for op in (aten.add, aten.mul, aten.sub, aten.div) for pair in (ROWS, IMAGES, HALF)),
    *((op.default, (each,), {}) for op in (aten.relu, aten.gelu, aten.silu, aten.exp) for each in (*ROWS, *IMAGES)),
    (aten.add.Scalar, (ROWS[0], 2), {}),
    (aten.add.Tensor, ROWS, {"alpha": 2}),
    (aten.gelu.default, ROWS[:1], {"approximate": "tanh"}),
    (aten.pow.Tensor_Scalar, (HALF[0], 2), {}),
    (aten.threshold_backward.default, (*IMAGES, 0), {}),
    (aten.addcdiv.default, (*ROWS, ROWS[0]), {"value": 0.5}),
    (aten.mul_.Tensor, ROWS, {}),
    (aten.add_.Tensor, (tensor(dtype=torch.int64), torch.tensor(1)), {}),
    (aten._foreach_sqrt.default, ([ROWS[0], IMAGES[0]],), {}),
    (aten._foreach_add.Scalar, ([ROWS[0], HALF[0]], 1), {}),
    (aten._foreach_mul_.Scalar, ([ROWS[0], IMAGES[0]], 0.9), {}),
    (aten._foreach_addcdiv_.ScalarList, ([ROWS[0]], [ROWS[1]], [ROWS[0]], [0.1]), {}),
]
LEFT: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.add.Tensor, (ROWS[0], tensor(16)), {}),  # broadcast
    (aten.add.Tensor, (ROWS[0], HALF[0]), {}),  # promoted
    (aten.mul.Tensor, (ROWS[0], tensor(8, 16, dtype=torch.bool)), {}),
    (aten.add.Tensor, (ROWS[0].t(), ROWS[1].t()), {}),  # in another layout
    (aten.add.Tensor, (*IMAGES[:1], tensor(2, 3, 8, 8)), {}),
    (aten.exp.default, (tensor(4, dtype=torch.int64),), {}),
    (aten.add_.Tensor, (tensor(4, dtype=torch.int64), torch.tensor(1.5)), {}),  # an error
    (aten._foreach_add.List, ([ROWS[0]], [tensor(16)]), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), TAKEN, ids=lambda value: str(value)[:30])
def test_what_is_taken_is_as_torch_has_it(op: Any, args: Any, kwargs: Any) -> None:
    found = shortcuts.result(op, args, kwargs)
    assert found is not shortcuts.NONE
    assert looks(found) == looks(op(*args, **kwargs))
    if op._schema.name.endswith("_") and found is not None:
        assert found is args[0]


@pytest.mark.parametrize(("op", "args", "kwargs"), LEFT, ids=lambda value: str(value)[:30])
def test_what_is_not_plain_is_left_to_torch(op: Any, args: Any, kwargs: Any) -> None:
    assert shortcuts.result(op, args, kwargs) is shortcuts.NONE
