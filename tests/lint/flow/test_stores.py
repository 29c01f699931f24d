"""Where does a holder live, what was freed by then, and does a later backward need what is kept?"""

from __future__ import annotations

import textwrap

import libcst as cst
import pytest

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import BackwardKind, Life, Store, StoreKind
from memlint.lint.flow.judge import Cost, judge
from memlint.lint.flow.windows import windows


def flow_of(code: str) -> Flow:
    return Flow(cst.parse_module(textwrap.dedent(code)))


def stores(code: str, *kinds: StoreKind) -> tuple[Flow, list[Store]]:
    flow = flow_of(code)
    wanted = kinds or (StoreKind.ACCUMULATE, StoreKind.COLLECT, StoreKind.CONCATENATE)
    return flow, [store for store in flow.stores() if store.kind in wanted]


def only(code: str, *kinds: StoreKind) -> tuple[Flow, Store]:
    flow, found = stores(code, *kinds)
    assert len(found) == 1, found
    return flow, found[0]


@pytest.mark.parametrize(
    ("code", "life"),
    [
        ("h = []\nfor x in xs:\n    h.append(net(x))", Life.LOOP),
        ("for x in xs:\n    h = []\n    h.append(net(x))", Life.ITERATION),
        ("for e in es:\n    h = []\n    for x in xs:\n        h.append(net(x))", Life.LOOP),
        ("for x in xs:\n    h.append(net(x))", Life.OUTER),
        ("def f(h):\n    for x in xs:\n        h.append(net(x))", Life.PARAM),
        ("def f():\n    h = []\n    h.append(net(x))", Life.CALL),
        ("class T:\n    def f(self):\n        self.h.append(net(x))", Life.SELF),
        (
            "class T:\n    def __init__(self):\n        self.h = []\n    def f(self):\n        self.h.append(net(x))",
            Life.SELF,
        ),
        ("h = []\ndef f():\n    h.append(net(x))", Life.OUTER),
        ("t = 0\nfor x in xs:\n    t += net(x)", Life.LOOP),
        ("for x in xs:\n    t = 0\n    t += net(x)", Life.ITERATION),
        ("h = {'a': []}\nfor x in xs:\n    h['a'].append(net(x))", Life.LOOP),
    ],
)
def test_where_the_holder_lives(code: str, life: Life) -> None:
    _, store = only(code)
    assert store.life is life


def test_the_loop_that_is_outlived_is_the_outermost_one() -> None:
    flow, store = only("h = []\nfor e in es:\n    for x in xs:\n        h.append(net(x))")
    assert store.across is not None
    assert store.across.over_text == "es"
    flow, store = only("for e in es:\n    h = []\n    for x in xs:\n        h.append(net(x))")
    assert store.across is not None
    assert store.across.over_text == "xs"
    del flow


@pytest.mark.parametrize(
    "code",
    [
        "total = 0\nfor x in xs:\n    total += loss",
        "total = 0\nfor x in xs:\n    total = total + loss",
        "total = 0\nfor x in xs:\n    total = loss + total",
        "total = 0\nfor x in xs:\n    total = 0.9 * total + 0.1 * loss",
        "total = 0\nfor x in xs:\n    total = total + a - loss",
        "total = 0\nfor x in xs:\n    total = torch.add(total, loss)",
        "total = torch.zeros(())\nfor x in xs:\n    total = total.add(loss)",
        "total = torch.zeros(())\nfor x in xs:\n    total.add_(loss)",
        "total = None\nfor x in xs:\n    total = loss if total is None else total + loss",
        "d = {}\nfor x in xs:\n    d['a'] = d['a'] + loss",
        "d = {}\nfor x in xs:\n    d['a'] = d.get('a', 0) + loss",
        "for x in xs:\n    self.total += loss",
    ],
)
def test_running_sums_in_all_their_forms(code: str) -> None:
    _, found = stores(code, StoreKind.ACCUMULATE)
    assert found, code


@pytest.mark.parametrize(
    "code",
    [
        "total = 0\nfor x in xs:\n    total = other + loss",
        "total = 0\nfor x in xs:\n    total = total.detach() + loss",
        "total = 0\nfor x in xs:\n    total = max(total, loss)",
        "total = 0\nfor x in xs:\n    total += loss.item()",
        "total = 0\nfor x in xs:\n    total += 1",
        "with torch.no_grad():\n    for x in xs:\n        total += loss",
    ],
)
def test_no_running_sum(code: str) -> None:
    _, found = stores(code, StoreKind.ACCUMULATE)
    assert not found, code


@pytest.mark.parametrize(
    "use",
    [
        "total.backward()",
        "(total / n).backward()",
        "loss = total.mean()\nloss.backward()",
        "torch.autograd.backward(total)",
        "torch.autograd.grad(total, p)",
        "accelerator.backward(total)",
        "scaler.scale(total).backward()",
        "with amp.scale_loss(total, opt) as scaled:\n    scaled.backward()",
        "self.manual_backward(total)",
        "fit(total)",
    ],
)
def test_a_later_backward_needs_the_sum(use: str) -> None:
    code = "def fit(loss):\n    loss.backward()\n\ntotal = 0\nfor x in xs:\n    total += crit(net(x))\n" + use
    flow, store = only(code)
    assert store.needed, use
    assert judge(flow, store) is None


@pytest.mark.parametrize(
    "use",
    [
        "sum(h).backward()",
        "torch.stack(h).mean().backward()",
        "h[-1].backward()",
        "for loss in h:\n    loss.backward()",
        "total = 0\nfor loss in h:\n    total = total + loss\ntotal.backward()",
        "loss = torch.cat([v * 2 for v in h]).sum()\nloss.backward()",
        "for a, b in zip(h, ys):\n    (a * b).backward()",
        "d = {'h': h}\nsum(d['h']).backward()",
    ],
)
def test_a_later_backward_needs_the_list(use: str) -> None:
    flow, found = stores("h = []\nfor x in xs:\n    h.append(crit(net(x)))\n" + use)
    store = found[0]
    assert store.needed, use
    assert judge(flow, store) is None


def test_a_number_read_from_the_sum_is_no_need() -> None:
    flow, store = only(
        """
        total = 0
        for x in xs:
            loss = crit(net(x))
            loss.backward()
            total += loss
        print(total / 3, f"{total}", total.item())
        """
    )
    assert not store.needed
    assert store.as_number
    kept = judge(flow, store)
    assert kept is not None
    assert kept.cost is Cost.NODES


def test_backward_frees_its_graph_before_and_after_the_store() -> None:
    for body in ("loss.backward()\n    h.append(loss)", "h.append(loss)\n    loss.backward()"):
        flow, store = only(f"h = []\nfor x in xs:\n    loss = crit(net(x))\n    {body}")
        kept = judge(flow, store)
        assert kept is not None
        assert kept.cost is Cost.NODES
        assert kept.freed_by is not None


def test_retain_graph_frees_nothing() -> None:
    flow, store = only(
        "h = []\nfor x in xs:\n    loss = crit(net(x))\n    loss.backward(retain_graph=True)\n    h.append(loss)"
    )
    assert not store.consumed
    del flow


def test_freed_on_one_path_only() -> None:
    flow, store = only(
        """
        h = []
        for x in xs:
            loss = crit(net(x))
            if train:
                loss.backward()
            h.append(loss)
        """
    )
    assert not store.consumed
    assert store.maybe_consumed
    assert judge(flow, store) is not None
    flow, store = only(
        """
        h = []
        for x in xs:
            loss = crit(net(x))
            if train:
                loss.backward()
                loss = loss.detach()
            h.append(loss)
        """
    )
    assert judge(flow, store) is None


def test_what_escapes_is_not_judged() -> None:
    for use in ("return total", "consume(total)", "self.total = total"):
        code = f"def f(self):\n    total = 0\n    for x in xs:\n        total += crit(net(x))\n    {use}"
        flow, store = only(code, StoreKind.ACCUMULATE)
        assert judge(flow, store) is None, use


def test_two_aliases_of_one_list() -> None:
    flow, found = stores(
        "h = []\nlog = h\nfor x in xs:\n    loss = crit(net(x))\n    log.append(loss)\nsum(h).backward()"
    )
    assert found[0].needed
    del flow


def test_emptied_list_belongs_to_the_window() -> None:
    flow, found = stores(
        """
        h = []
        for i, x in enumerate(xs):
            h.append(crit(net(x)))
            if i % 4 == 3:
                sum(h).backward()
                h = []
        """
    )
    assert found[0].needed
    del flow


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("loss.backward()", BackwardKind.TENSOR),
        ("accelerator.backward(loss)", BackwardKind.ACCELERATOR),
        ("self.fabric.backward(loss)", BackwardKind.FABRIC),
        ("model_engine.backward(loss)", BackwardKind.ENGINE),
        ("self.manual_backward(loss)", BackwardKind.MANUAL),
        ("torch.autograd.backward([loss])", BackwardKind.AUTOGRAD),
        ("torch.autograd.grad(loss, p)", BackwardKind.GRAD),
        (
            "class M(LightningModule):\n    def training_step(self, b, i):\n        return self.f(b)",
            BackwardKind.FRAMEWORK,
        ),
        ("class T(Trainer):\n    def compute_loss(self, m, i):\n        return m(i).loss", BackwardKind.FRAMEWORK),
    ],
)
def test_ways_to_run_backward(code: str, kind: BackwardKind) -> None:
    assert [event.kind for event in flow_of(code).backwards()] == [kind]


def test_windows() -> None:
    flow = flow_of(
        """
        for i, x in enumerate(xs):
            loss = crit(net(x))
            loss.backward()
            if (i + 1) % accum_steps == 0:
                opt.step()
        """
    )
    (window,) = windows(flow.top)
    assert window.named
    assert window.length is not None
    assert flow.text(window.length) == "accum_steps"
    for code in (
        "for x in xs:\n    loss.backward()\n    opt.step()",
        "for i, x in enumerate(xs):\n    if i % 4 == 0:\n        loss.backward()\n        opt.step()",
        "for i, x in enumerate(xs):\n    loss.backward()\n    opt_d.step()\n    if i % 4 == 0:\n        opt_g.step()",
    ):
        assert not list(windows(flow_of(code).top)), code


def test_long_functions_cost_linear_time() -> None:
    """Twice the code costs about twice the work (counted in evaluations, which no other load disturbs)."""
    unit = (
        "        x{i} = model{i}(x)\n        loss{i} = crit(x{i})\n        if c{i}:\n"
        "            loss{i} = loss{i} / 2\n        h.append(loss{i})\n        loss{i}.backward()\n"
    )
    ticks = []
    for n in (50, 100, 200):
        flow = flow_of("def main():\n    h = []\n    for x in xs:\n" + "".join(unit.format(i=i) for i in range(n)))
        ticks.append(flow.tick())
    assert ticks[1] < 2.2 * ticks[0]
    assert ticks[2] < 2.2 * ticks[1]


def test_deep_loops_end() -> None:
    depth = 10
    code = "".join("    " * i + f"for x{i} in a{i}:\n" for i in range(depth)) + "    " * depth + "t += crit(x0)\n"
    flow, found = stores(code)
    assert len(found) == 1
    del flow


def test_a_long_chain_of_calls_ends() -> None:
    code = "".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(400))
    assert len(flow_of(code).functions) == 401
