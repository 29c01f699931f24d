"""The table of cards: it hangs together, and people's names for a card find it."""

from __future__ import annotations

import pytest

from memlint.errors import ConfigError
from memlint.units import parse_bytes
from memlint.virtual.cards import CARDS, CONTEXT_ERROR, Card, card, context_bytes

#: what the label of the card promises, in GiB
LABELS = {
    "t4": 16,
    "p100": 16,
    "v100-16gb": 16,
    "v100-32gb": 32,
    "a10": 24,
    "a10g": 24,
    "a30": 24,
    "a40": 48,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "l4": 24,
    "l40s": 48,
    "h100": 80,
    "h100-pcie": 80,
    "h200": 141,
    "b200": 180,
    "rtx-2080-ti": 11,
    "rtx-3060": 12,
    "rtx-3070": 8,
    "rtx-3080": 10,
    "rtx-3090": 24,
    "rtx-4060-ti": 8,
    "rtx-4070": 12,
    "rtx-4080": 16,
    "rtx-4090": 24,
    "rtx-5080": 16,
    "rtx-5090": 32,
    "rtx-a4000": 16,
    "rtx-a5000": 24,
    "rtx-a6000": 48,
    "rtx-6000-ada": 48,
}


def test_the_table_has_the_cards_that_it_should() -> None:
    assert set(CARDS) == set(LABELS)


@pytest.mark.parametrize("each", CARDS.values(), ids=CARDS)
def test_a_total_is_near_the_label_and_within_what_was_seen(each: Card) -> None:
    label = LABELS[each.name] * 2**30
    assert 0.88 * label < each.totals_seen[0] <= each.total_bytes <= each.totals_seen[1] <= 1.01 * label
    assert each.source


@pytest.mark.parametrize("each", CARDS.values(), ids=CARDS)
def test_what_follows_from_the_capability(each: Card) -> None:
    assert each.bf16 is each.tf32 is (each.capability[0] >= 8)
    assert 48 * 1024 <= each.shared_bytes_per_block <= 227 * 1024
    assert each.threads_per_multiprocessor in (1024, 1536, 2048)


@pytest.mark.parametrize("each", CARDS.values(), ids=CARDS)
def test_a_card_is_found_by_each_of_its_names(each: Card) -> None:
    for name in (each.name, each.title, each.title.upper(), each.name.replace("-", " "), *each.aliases):
        assert card(name) is each


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("t4", "t4"),
        ("Tesla T4", "t4"),
        ("rtx-3090", "rtx-3090"),
        ("RTX3060", "rtx-3060"),
        ("3060", "rtx-3060"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("4060ti", "rtx-4060-ti"),
        ("A100-40GB", "a100-40gb"),
        ("a100_80gb", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("h100", "h100"),
        ("H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("a10", "a10"),
        ("A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("2080ti", "rtx-2080-ti"),
        ("l40", "l40s"),
    ],
)
def test_names_as_people_write_them(written: str, meant: str) -> None:
    assert card(written).name == meant


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("a100", "there is more than one card 'a100': write a100-40gb or a100-80gb"),
        ("v100", "there is more than one card 'v100': write v100-16gb or v100-32gb"),
        ("rtx 3091", "no card 'rtx 3091' is known here: did you mean rtx-3090"),
        ("", "no card '' is known here: known are t4, p100,"),
        ("RTX", "no card 'RTX' is known here: known are t4, p100,"),
        ("radeon vii", "no card 'radeon vii' is known here: "),
    ],
)
def test_names_that_mean_no_one_card(written: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        card(written)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("t4", "115 MiB", "164 MiB"),
        ("rtx-a4000", "210 MiB", "210 MiB"),
        ("v100-32gb", "379 MiB", "389 MiB"),
        ("rtx-3090", "354 MiB", "488 MiB"),
        ("a100-40gb", "505 MiB", "522 MiB"),
        ("rtx-4090", "473 MiB", "473 MiB"),
        ("h100", "666 MiB", "666 MiB"),
        ("rtx-6000-ada", "426 MiB", "426 MiB"),
    ],
)
def test_the_context_is_near_what_was_measured(name: str, low: str, high: str) -> None:
    estimate, source = context_bytes(card(name), "2.13.0")
    assert estimate * (1 - CONTEXT_ERROR) <= parse_bytes(low)
    assert parse_bytes(high) <= estimate * (1 + CONTEXT_ERROR)
    assert "estimate" in source
    assert "2.13.0" in source
