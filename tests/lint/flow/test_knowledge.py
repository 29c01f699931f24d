"""The tables about torch, checked against the torch that is installed (skipped without one)."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

from memlint.lint.flow import knowledge as know

torch: Any = pytest.importorskip("torch", exc_type=ImportError)

#: arguments that a method needs, beside the receiver
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "new_full": ((2,), 1.0),
    "new_tensor": ([1.0],),
    "multinomial": (1,),
    "clamp_min": (0.1,),
    "clamp_max": (0.1,),
    "clamp": (0.1, 0.9),
    "expand": (2, 2),
    "repeat": (2, 2),
    "pow": (2,),
    "softmax": (0,),
    "log_softmax": (0,),
    "chunk": (2,),
    "split": (1,),
    "narrow": (0, 0, 1),
    "select": (0, 0),
    "index_select": (0, torch.tensor([0])),
    "gather": (0, torch.zeros(2, 2, dtype=torch.int64)),
    "masked_fill": (torch.ones(2, 2, dtype=torch.bool), 0.0),
    "masked_select": (torch.ones(2, 2, dtype=torch.bool),),
    "scatter": (0, torch.zeros(2, 2, dtype=torch.int64), 1.0),
    "roll": (1,),
    "flip": (0,),
    "cumsum": (0,),
    "unfold": (0, 1, 1),
    "transpose": (0, 1),
    "permute": (1, 0),
    "view": (4,),
    "reshape": (4,),
    "unsqueeze": (0,),
    "swapaxes": (0, 1),
    "movedim": (0, 1),
    "topk": (1,),
    "logsumexp": (0,),
    "type": (torch.float64,),
}
#: take another tensor of the same shape
BINARY = frozenset(
    """
    eq ne lt gt le ge greater less greater_equal less_equal not_equal logical_and logical_or logical_xor allclose equal
    isclose expand_as view_as type_as mul div add sub true_divide divide multiply subtract rsub
    """.split()
)
#: need a device or a type that is not here, or integers
ELSEWHERE = frozenset(
    "cuda xpu npu pin_memory bitwise_and bitwise_or bitwise_not bincount rsub get_device storage".split()
)


def outputs(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def called(name: str) -> Any:
    x = torch.rand(2, 2, requires_grad=True) + 0.1
    if name in ("histc",):
        x = x.flatten()
    if name in ("item", "tolist", "t", "numpy"):
        return None if name != "t" else x.t()
    arguments = ARGUMENTS.get(name, (x.detach().clone(),) if name in BINARY else ())
    return getattr(x, name)(*arguments)


@pytest.mark.parametrize("name", sorted(know.DETACHING_METHODS - ELSEWHERE))
def test_detaching_methods(name: str) -> None:
    if name.startswith("new_") and name not in ARGUMENTS:
        result = getattr(torch.rand(2, 2, requires_grad=True), name)((2, 2))
    else:
        result = called(name)
    assert not any(output.requires_grad for output in outputs(result)), name


@pytest.mark.parametrize("name", sorted(know.TRANSPARENT_METHODS - ELSEWHERE - {"requires_grad_"}))
def test_transparent_methods(name: str) -> None:
    if name == "retain_grad":
        return
    result = outputs(called(name))
    assert result
    assert result[0].requires_grad, name


@pytest.mark.parametrize("name", sorted(know.VALUES_AND_INDICES))
def test_indices_carry_no_graph(name: str) -> None:
    x = torch.rand(4, 4, requires_grad=True) * 1.0
    arguments = (2,) if name in ("topk", "kthvalue") else (1,)
    values, indices = getattr(x, name)(*arguments)
    assert values.requires_grad
    assert not indices.requires_grad


@pytest.mark.parametrize("name", sorted(know.DETACHED_ATTRIBUTES - {"training", "names"}))
def test_detached_attributes(name: str) -> None:
    value = getattr(torch.rand(2, 2, requires_grad=True) * 1.0, name)
    assert not (isinstance(value, torch.Tensor) and value.requires_grad)


def test_variable_starts_without_a_graph() -> None:
    y = torch.rand(2, requires_grad=True) * 2
    assert not torch.autograd.Variable(y).requires_grad


def test_in_place_under_no_grad_is_not_recorded() -> None:
    total, loss = torch.zeros(()), torch.rand((), requires_grad=True) * 2
    with torch.no_grad():
        total += loss
    assert not total.requires_grad
    total += loss
    assert total.requires_grad


def test_numpy_refuses_a_graph() -> None:
    pytest.importorskip("numpy")
    with pytest.raises(RuntimeError, match="requires grad"):
        (torch.rand(2, requires_grad=True) * 2).numpy()


def test_autograd_is_off_in_a_functions_forward() -> None:
    seen = []

    class Probe(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            seen.append(torch.is_grad_enabled())
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.append(torch.is_grad_enabled())
            return grad * 2

    Probe.apply(torch.rand(2, requires_grad=True)).sum().backward()
    assert seen == [False, False]


def test_set_to_none_is_the_default() -> None:
    for function in (torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad):
        assert inspect.signature(function).parameters["set_to_none"].default is True


def test_checkpoint_arguments() -> None:
    from torch.utils.checkpoint import checkpoint

    parameters = inspect.signature(checkpoint).parameters
    assert parameters["use_reentrant"].default is None
    assert '"preserve_rng_state", True' in inspect.getsource(checkpoint)


def test_reentrant_checkpoint_of_data_gives_no_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="requires_grad"):
        out = checkpoint(layer, torch.randn(2, 3), use_reentrant=True)
    assert not out.requires_grad
    assert checkpoint(layer, torch.randn(2, 3), use_reentrant=False).requires_grad


def test_create_graph_backward_ties_parameter_and_gradient() -> None:
    import gc
    import weakref

    def alive_after(clear: bool) -> bool:
        p = torch.nn.Parameter(torch.rand(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about it, once a process
            (p**3).sum().backward(create_graph=True)
        if clear:
            p.grad = None
        reference = weakref.ref(p)
        del p
        gc.collect()
        return reference() is not None

    assert alive_after(clear=False)
    assert not alive_after(clear=True)


def test_eval_does_not_switch_autograd_off() -> None:
    assert torch.nn.Linear(2, 2).eval()(torch.rand(1, 2)).requires_grad


def test_preserve_rng_state_false_draws_another_mask() -> None:
    from torch.utils.checkpoint import checkpoint

    drop = torch.nn.Dropout(0.5)
    wrong = 0
    for _ in range(5):
        x = torch.ones(64, requires_grad=True)
        out = checkpoint(lambda v: drop(v * 2) * v, x, use_reentrant=False, preserve_rng_state=False)
        out.sum().backward()
        wrong += int(not torch.equal(x.grad == 0, out.detach() == 0))
        x = torch.ones(64, requires_grad=True)
        out = checkpoint(lambda v: drop(v * 2) * v, x, use_reentrant=False)
        out.sum().backward()
        assert torch.equal(x.grad == 0, out.detach() == 0)
    assert wrong
