"""What does an expression hold at a point of the program?

The snippets call `probe(expression)`; the tests ask what the model saw there.
"""

from __future__ import annotations

import textwrap

import libcst as cst
import pytest

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent
from memlint.lint.flow.values import Grade, Kind, Source, Value


def flow_of(code: str) -> Flow:
    return Flow(cst.parse_module(textwrap.dedent(code)))


def probes(code: str) -> list[tuple[Flow, CallEvent]]:
    flow = flow_of(code)
    return [(flow, call) for call in sorted(flow.calls(), key=lambda c: c.order) if call.text == "probe"]


def probed(code: str) -> tuple[Flow, Value]:
    ((flow, call),) = probes(code)
    return flow, call.args[0]


def grade(flow: Flow, value: Value) -> Grade:
    return max((flow.grade(origin) for origin in value.graph), default=Grade.NO)


@pytest.mark.parametrize(
    "expression",
    [
        "loss.item()",
        "float(loss)",
        "loss.detach()",
        "loss.data",
        "loss.detach().cpu() * 2",
        "loss > 1",
        "loss.argmax(1)",
        "out.shape",
        "len(out)",
        "f'{loss}'",
        "torch.zeros_like(out)",
        "out.max(1)[1]",
        "np.mean(out)",
        "loss.tolist()[0]",
        "(loss if False else 0.0)",
        "torch.argmax(out, dim=1)",
        "[loss.item() for _ in range(3)][0]",
        "{'a': loss.item()}['a']",
        "int(loss) + 1",
    ],
)
def test_cut_from_the_graph(expression: str) -> None:
    flow, value = probed(
        f"import torch\nimport numpy as np\nout = net(x)\nloss = crit(out)\nloss.backward()\nprobe({expression})"
    )
    assert grade(flow, value) is Grade.NO, value


@pytest.mark.parametrize(
    "expression",
    [
        "loss",
        "loss.cpu()",
        "loss.to('cpu', non_blocking=True)",
        "loss.clone()",
        "loss * 2",
        "1 - loss",
        "-loss",
        "loss.mean() / 3",
        "torch.stack([loss])",
        "[loss][0]",
        "[loss][-1]",
        "{'a': loss}['a']",
        "(0, loss)[1]",
        "sum([loss, loss])",
        "max(loss, 0)",
        "scaler.scale(loss)",
        "copy.copy(loss)",
        "loss if flag else None",
        "next(iter([loss]))",
        "[value for value in [loss]][0]",
        "loss.max(1)[0]",
        "loss.view(-1)[0]",
    ],
)
def test_still_in_the_graph(expression: str) -> None:
    flow, value = probed(f"import torch, copy\nloss = crit(net(x))\nloss.backward()\nprobe({expression})")
    assert grade(flow, value) is Grade.CERTAIN, value


def test_backward_later_in_the_file_is_evidence_too() -> None:
    flow, value = probed("probe(loss)\nloss.backward()")
    assert grade(flow, value) is Grade.CERTAIN


def test_the_binding_that_reaches_decides_not_the_name() -> None:
    (first, second) = probes(
        """
        loss = crit(net(x))
        loss.backward()
        probe(loss)
        loss = loss.item()
        probe(loss)
        """
    )
    assert grade(first[0], first[1].args[0]) is Grade.CERTAIN
    assert second[1].args[0].kind is Kind.NUMBER


def test_branches_are_joined() -> None:
    flow, value = probed(
        """
        loss = crit(net(x))
        loss.backward()
        if flag:
            loss = 0.0
        probe(loss)
        """
    )
    assert grade(flow, value) is Grade.CERTAIN


@pytest.mark.parametrize(
    "test",
    ["isinstance(loss, torch.Tensor)", "torch.is_tensor(loss)", "hasattr(loss, 'item')", "isinstance(loss, Tensor)"],
)
def test_type_tests_narrow(test: str) -> None:
    flow, value = probed(
        f"""
        loss = crit(net(x))
        loss.backward()
        if {test}:
            loss = loss.item()
        probe(loss)
        """
    )
    assert grade(flow, value) is Grade.NO


def test_a_branch_that_leaves_does_not_reach() -> None:
    flow, value = probed(
        """
        def f(loss):
            loss.backward()
            if not isinstance(loss, float):
                return
            probe(loss)
        """
    )
    assert grade(flow, value) in (Grade.NO, Grade.CERTAIN)


def test_loops_run_to_a_fixpoint() -> None:
    flow, value = probed(
        """
        a, b, c = 0.0, 0.0, 0.0
        for x in loader:
            probe(c)
            c = b
            b = a
            a = crit(net(x))
            a.backward()
        """
    )
    assert grade(flow, value) is Grade.CERTAIN
    assert all(origin.old for origin in value.graph), "it comes from an earlier iteration"


def test_earlier_iterations_are_told_from_this_one() -> None:
    flow, value = probed(
        """
        last = None
        for x in loader:
            loss = crit(net(x))
            probe([last, loss])
            last = loss
        """
    )
    (first, second) = probes(
        """
        last = None
        for x in loader:
            loss = crit(net(x))
            probe(last)
            probe(loss)
            last = loss
        """
    )
    assert {origin.old for origin in first[1].args[0].graph} == {True}
    assert {origin.old for origin in second[1].args[0].graph} == {False}
    del flow, value


def test_attributes_and_items_follow_the_object_not_the_name() -> None:
    flow, value = probed(
        """
        out = net(x)
        same = out
        same["loss"] = 0.0
        probe(out["loss"])
        """
    )
    assert value.kind is Kind.NUMBER
    assert not value.graph
    del flow


def test_tuples_are_unpacked() -> None:
    flow = flow_of("loss, n = crit(net(x)), len(x)\nloss.backward()\nprobe(n)\nprobe(loss)")
    numbers, tensors = [c.args[0] for c in sorted(flow.calls(), key=lambda c: c.order) if c.text == "probe"]
    assert numbers.kind is Kind.NUMBER
    assert grade(flow, tensors) is Grade.CERTAIN


@pytest.mark.parametrize(
    "code",
    [
        "with torch.no_grad():\n    y = net(x)\n    probe(y)",
        "with torch.inference_mode(), open(p):\n    y = net(x)\n    probe(y)",
        "with torch.set_grad_enabled(False):\n    probe(net(x))",
        "torch.set_grad_enabled(False)\nprobe(net(x))",
        "@torch.no_grad()\ndef f(net, x):\n    probe(net(x))",
        "@torch.inference_mode()\ndef f(net, x):\n    probe(net(x))",
        "from torch import no_grad\n@no_grad()\ndef f(net, x):\n    probe(net(x))",
        "import torch as t\nwith t.no_grad():\n    probe(net(x))",
        "from torch.autograd import no_grad as ng\nwith ng():\n    probe(net(x))",
        "off = torch.no_grad()\nwith off:\n    probe(net(x))",
        "def off():\n    return torch.no_grad()\nwith off():\n    probe(net(x))",
        "with contextlib.ExitStack() as stack:\n    stack.enter_context(torch.no_grad())\n    probe(net(x))",
        "class M(pl.LightningModule):\n    def validation_step(self, batch, i):\n        probe(self.net(batch))",
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        probe(net(x))",
        "if torch.is_grad_enabled():\n    pass\nelse:\n    probe(net(x))",
        "with torch.no_grad():\n    z = y * 2\nprobe(z)",
    ],
)
def test_no_grad_in_all_its_forms(code: str) -> None:
    flow, value = probed(code)
    assert grade(flow, value) is Grade.NO, value


@pytest.mark.parametrize(
    "code",
    [
        "with torch.no_grad():\n    pass\nprobe(net(x))",
        "with torch.no_grad():\n    with torch.enable_grad():\n        probe(net(x))",
        "with torch.set_grad_enabled(True):\n    probe(net(x))",
        "with autocast('cuda'):\n    probe(net(x))",
        "def no_grad_needed():\n    pass\nprobe(net(x))",
        "class M(pl.LightningModule):\n    def training_step(self, batch, i):\n        probe(self.net(batch))",
        "with torch.inference_mode(False):\n    probe(net(x))",
    ],
)
def test_grad_stays_on(code: str) -> None:
    flow, value = probed(code)
    assert grade(flow, value) is Grade.WEAK, value


@pytest.mark.parametrize(
    "code",
    [
        "with torch.set_grad_enabled(train):\n    probe(net(x))",
        "with no_grad_if(flag):\n    probe(net(x))",
        "with (torch.no_grad() if flag else nullcontext()):\n    probe(net(x))",
        "from mine import no_grad\nwith no_grad():\n    probe(net(x))",
        "from mine import disable_grad\n@disable_grad\ndef f(net, x):\n    probe(net(x))",
    ],
)
def test_unknown_stays_unknown(code: str) -> None:
    flow, value = probed(code)
    assert grade(flow, value) is Grade.UNKNOWN, value


def test_no_grad_does_not_detach_what_exists() -> None:
    flow, value = probed("loss = crit(net(x))\nloss.backward()\nwith torch.no_grad():\n    probe(loss)")
    assert grade(flow, value) is Grade.CERTAIN


def test_functions_of_the_file_are_known_by_what_they_return() -> None:
    flow, value = probed(
        """
        def step(x):
            loss = crit(net(x))
            loss.backward()
            return loss.item(), {"a": loss.item()}
        value, stats = step(x)
        probe(value)
        """
    )
    assert value.kind is Kind.NUMBER
    flow, value = probed(
        """
        def step(x):
            loss = crit(net(x))
            loss.backward()
            return loss
        probe(step(x))
        """
    )
    assert grade(flow, value) is Grade.CERTAIN


def test_a_function_hands_its_argument_through() -> None:
    flow, value = probed("def same(x):\n    return x\nloss.backward()\nprobe(same(loss))")
    assert grade(flow, value) is Grade.CERTAIN
    flow, value = probed("def cut(x):\n    return x.detach()\nloss.backward()\nprobe(cut(loss))")
    assert grade(flow, value) is Grade.NO


def test_recursion_ends() -> None:
    flow, value = probed("def f(x):\n    return f(x) if x else g(x)\ndef g(x):\n    return f(x)\nprobe(g(y))")
    assert grade(flow, value) is Grade.UNKNOWN


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("probe(nn.Linear(3, 3))", Kind.MODULE),
        ("probe(nn.CrossEntropyLoss())", Kind.CRITERION),
        ("probe(torch.optim.Adam(p))", Kind.OPTIMIZER),
        ("from torch.cuda.amp import GradScaler as G\nprobe(G())", Kind.SCALER),
        ("probe(DataLoader(d))", Kind.LOADER),
        ("probe(Accelerator())", Kind.ACCELERATOR),
        ("class Net(nn.Module):\n    pass\nprobe(Net())", Kind.MODULE),
        ("class Base(nn.Module):\n    pass\nclass Net(Base):\n    pass\nprobe(Net().to(d).eval())", Kind.MODULE),
        ("probe([1, 2])", Kind.CONTAINER),
        ("probe(deque(maxlen=3))", Kind.CONTAINER),
        ("probe(torch.no_grad())", Kind.GRAD_MODE),
        ("probe(3)", Kind.NUMBER),
        ("probe(None)", Kind.NONE),
        ("probe(torch.zeros(3))", Kind.TENSOR),
        (
            "class T:\n    def __init__(self):\n        self.opt = torch.optim.SGD(p)\n"
            "    def f(self):\n        probe(self.opt)",
            Kind.OPTIMIZER,
        ),
        (
            "class T:\n    def __init__(self):\n        self.seen = []\n    def f(self):\n        probe(self.seen)",
            Kind.CONTAINER,
        ),
    ],
)
def test_kinds_come_from_bindings(code: str, kind: Kind) -> None:
    _, value = probed(code)
    assert value.kind is kind


def test_names_are_weak_evidence_and_bindings_beat_them() -> None:
    flow, value = probed("probe(criterion(model(x), y))")
    assert grade(flow, value) is Grade.WEAK
    flow, value = probed("def criterion(a, b):\n    return 0.5\nprobe(criterion(model(x), y))")
    assert value.kind is Kind.NUMBER
    flow, value = probed("model = len\nprobe(loader(x))")
    assert grade(flow, value) is Grade.UNKNOWN


def test_division_is_remembered() -> None:
    for code, divided in [
        ("probe(loss / n)", True),
        ("probe(loss * (1 / n))", True),
        ("probe(loss * 0.5)", False),
        ("probe(scaler.scale(loss))", False),
        ("loss /= n\nprobe(loss)", True),
        ("probe(loss.div(n))", True),
        ("probe(loss / n + reg / n)", True),
        ("probe(loss / n + reg)", False),
    ]:
        _, value = probed(code)
        assert value.divided is divided, code


def test_calls_know_their_sources() -> None:
    _, value = probed("probe(net(x))")
    assert {origin.source for origin in value.graph} == {Source.MODEL_CALL}
    _, value = probed("probe(prepare_model(x))")
    assert {origin.source for origin in value.graph} == {Source.CALL}
    _, value = probed("probe(F.cross_entropy(net(x), y))")
    assert {origin.source for origin in value.graph} == {Source.LOSS_CALL}
