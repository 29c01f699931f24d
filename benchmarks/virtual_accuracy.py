"""What the virtual device predicts, against what was measured on real cards.

    python benchmarks/virtual_accuracy.py                       # all rows of the file
    python benchmarks/virtual_accuracy.py t4 --max-median 2 --max-worst 4
    python benchmarks/virtual_accuracy.py --data FILE.json xmem
    python benchmarks/virtual_accuracy.py --measure OUT.json    # on a real card: fresh rows of the same shape

A row of the list `t4` is one steady training step after one of warm-up (peaks reset between them): allocated and
reserved. A row of `xmem` is a run of four steps, by NVML: the peak less the first sample. Its programs (public
repository Stone-ResearchLife/xMem: exp/run.py at 06ab550, `_get_ground_truth`; exp/trainer/__init__.py at 0715122,
`FastRunner.train_on_gpu`) take that sample when torch.cuda is initialised already, so that the figure holds what the
allocator reserved and not the CUDA context: predicted is the peak of what is reserved. Batches come from the host in
each step, and gradients are dropped before backward (exp/trainer/train_loop.py at 0fa57ba, mode 1, the trainer's
default), or where the row's `zero_grad_mode` says. Three steps are run; the fourth changed no peak that was tried.
Models are built from transformers' configurations and from `architectures.py`; none is downloaded. Rows whose package
is not installed are named as not run. The last line says how many rows ran, and the median and worst error; exit 1
where one of them is past its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import architectures

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "cuda_peaks.json"
CLASSES = 1000


class NotRun(Exception):  # noqa: N818
    """The row cannot be run here; says why."""


#: transformers' models by the name that their weights go by: configuration, model, what differs from the defaults
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "distilgpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 6}),
    "gpt2-medium": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-base-uncased": ("BertConfig", "BertModel", {}),
    "bert-base-cased": ("BertConfig", "BertModel", {"vocab_size": 28996}),
    "bert-large-uncased": (
        "BertConfig",
        "BertModel",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "distilbert-base-uncased": ("DistilBertConfig", "DistilBertModel", {}),
    "roberta-base": (
        "RobertaConfig",
        "RobertaModel",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    "roberta-large": (
        "RobertaConfig",
        "RobertaModel",
        {
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "albert-base-v2": (
        "AlbertConfig",
        "AlbertModel",
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "electra-base-discriminator": (
        "ElectraConfig",
        "ElectraModel",
        {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "opt-125m": ("OPTConfig", "OPTForCausalLM", {}),
    "opt-350m": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "pythia-160m": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"intermediate_size": 3072},
    ),
    "pythia-410m": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {"vocab_size": 50304, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096},
    ),
    "tinyllama-1.1b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"intermediate_size": 5632, "max_position_embeddings": 2048},
    ),
    "llama-7b": ("LlamaConfig", "LlamaForCausalLM", {"max_position_embeddings": 2048}),
    "qwen2-0.5b": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True},
    ),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "t5-base": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
    ),
    "vit-base-patch16-224": ("ViTConfig", "ViTForImageClassification", {"num_labels": CLASSES}),
    "vit-large-patch16-224": (
        "ViTConfig",
        "ViTForImageClassification",
        {"num_labels": CLASSES, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096},
    ),
    "deit-base-patch16-224": ("DeiTConfig", "DeiTForImageClassification", {"num_labels": CLASSES}),
}


def model_of(row: dict[str, Any]) -> tuple[torch.nn.Module, str]:
    """The model of a row, on the device, and what kind of step it takes: causal, encoder, seq2seq or vision."""
    name = str(row["model"])
    key = name.rsplit("/", 1)[-1].lower()
    if key not in _MODELS:
        try:
            return architectures.build(name).to("cuda").train(), "vision"
        except KeyError as error:
            raise NotRun(str(error.args[0])) from None
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise NotRun("transformers is not installed") from None
    transformers.logging.set_verbosity_error()
    config_name, class_name, settings = _MODELS[key]
    config = getattr(transformers, config_name)(**settings)
    if row.get("image_size"):
        config.image_size = row["image_size"]
    model = getattr(transformers, class_name)(config)
    if row.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable()
    if "ImageClassification" in class_name:
        kind = "vision"
    elif "Conditional" in class_name:
        kind = "seq2seq"
    else:
        kind = "causal" if "LM" in class_name else "encoder"
    return model.to("cuda").train(), kind


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a name, with its defaults."""
    known = {kind.lower(): getattr(torch.optim, kind) for kind in torch.optim.__all__ if kind[0].isupper()}
    made = known.get(name.lower().replace("_", ""))
    if made is None:
        raise NotRun(f"no optimizer {name!r} in torch.optim")
    return made(model.parameters(), lr=1e-3)  # type: ignore[no-any-return]


def first_steps(row: dict[str, Any]) -> None:
    """A row of `xmem`: three of the four steps that its programs run."""
    name = str(row["model"])
    settings = {"num_classes": 10} if "NetV3" in name or name.lower().startswith("mnas") else {}
    try:
        model = architectures.build(name, **settings).to("cuda").train()
    except KeyError as error:
        raise NotRun(str(error.args[0])) from None
    optimizer = optimizer_of(row["optimizer"], model)
    mode = row.get("zero_grad_mode", 1)
    images = torch.empty(row["batch"], 3, 86, 86)
    labels = torch.zeros(row["batch"], dtype=torch.long)
    for _ in range(3):
        if mode == 0:
            optimizer.zero_grad()
        inputs, targets = images.to("cuda"), labels.to("cuda")
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        if mode in (1, None):
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.max(outputs, 1)
        if mode == 2:
            optimizer.zero_grad()


def step_of(row: dict[str, Any]) -> Callable[[], None]:
    """The training step of a row."""
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    precision = row.get("precision", "fp32")
    model, kind = model_of(row)
    if precision in ("fp16", "bf16"):
        model = model.to(dtypes[precision])
    optimizer = optimizer_of(row["optimizer"], model)
    batch = int(row["batch_size"])
    cast = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if kind == "vision":
        size = row.get("image_size", 224)
        images = torch.randn(batch, 3, size, size, device="cuda", dtype=dtypes.get(precision, torch.float32))
        labels = torch.randint(0, CLASSES, (batch,), device="cuda")
    else:
        ids = torch.randint(0, model.config.vocab_size, (batch, row["seq_len"]), device="cuda")  # type: ignore[union-attr,arg-type]

    def loss_of() -> torch.Tensor:
        if kind == "vision":
            out = model(images)
            loss = torch.nn.functional.cross_entropy(getattr(out, "logits", out), labels)
            if getattr(out, "aux_logits", None) is not None:
                loss = loss + 0.4 * torch.nn.functional.cross_entropy(out.aux_logits, labels)
            return loss
        if kind == "encoder":
            return model(input_ids=ids).last_hidden_state.float().pow(2).mean()  # type: ignore[no-any-return]
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=cast, enabled=precision == "amp"):
            loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def peaks(row: dict[str, Any], *, whole: bool) -> tuple[int, int]:
    """Peak allocated and reserved bytes: of the second step, or of a whole run."""
    if whole:
        first_steps(row)
    else:
        step = step_of(row)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def predicted(row: dict[str, Any], *, whole: bool) -> tuple[int, int]:
    """What the virtual device says: allocated and reserved."""
    from memlint.virtual.device import VirtualCuda

    with VirtualCuda(row["gpu"]):
        return peaks(row, whole=whole)


def show(table: str, row: dict[str, Any]) -> list[float]:
    """Run a row and print it; its errors, the first of which counts."""
    shape = [
        str(row[key])
        for key in ("optimizer", "batch_size", "batch", "seq_len", "image_size", "precision")
        if key in row
    ]
    name = f"{row['model']} {' '.join(shape)} {row['gpu']}"
    began = time.perf_counter()
    try:
        allocated, reserved = predicted(row, whole=table == "xmem")
    except NotRun as why:
        print(f"{name:58} not run: {why}")
        return []
    except torch.OutOfMemoryError as error:
        print(f"{name:58} out of memory: {str(error).partition('. ')[0]}")
        return [float("inf")]
    seconds = time.perf_counter() - began
    pairs = (
        [("process", reserved, row["nvml_peak_minus_start_bytes"])]
        if table == "xmem"
        else [("allocated", allocated, row["allocated"]), ("reserved", reserved, row["reserved"])]
    )
    errors = [(mine / measured - 1) * 100 for _, mine, measured in pairs]
    said = "  ".join(
        f"{what} {mine / 2**20:9.1f} of {measured / 2**20:9.1f} MiB {error:+6.2f} %"
        for (what, mine, measured), error in zip(pairs, errors, strict=True)
    )
    print(f"{name:58} {said}  {seconds:5.2f} s", flush=True)
    return errors


#: what `--measure` runs on a real card
FRESH = [
    {"model": model, "batch_size": batch, "precision": precision, "optimizer": optimizer, **more}
    for model, batch, precision, optimizer, more in (
        ("gpt2", 4, "amp", "adamw", {"seq_len": 512}),
        ("gpt2", 4, "fp32", "adamw", {"seq_len": 512, "gradient_checkpointing": True}),
        ("gpt2-medium", 2, "bf16", "adamw", {"seq_len": 1024}),
        ("bert-base-uncased", 16, "amp", "adamw", {"seq_len": 256}),
        ("t5-small", 8, "fp32", "adam", {"seq_len": 256}),
        ("pythia-160m", 4, "bf16", "sgd", {"seq_len": 512}),
        ("tinyllama-1.1b", 1, "bf16", "adamw", {"seq_len": 1024}),
        ("vit-base-patch16-224", 32, "amp", "adamw", {"image_size": 224}),
        ("resnet50", 64, "amp", "sgd", {"image_size": 224}),
        ("resnet50", 64, "fp32", "adamw", {"image_size": 224}),
        ("convnext_tiny", 32, "amp", "adamw", {"image_size": 224}),
        ("mobilenet_v2", 64, "fp32", "rmsprop", {"image_size": 224}),
        ("regnet_y_8gf", 16, "amp", "sgd", {"image_size": 224}),
        ("vgg16", 16, "fp32", "sgd", {"image_size": 224}),
    )
]


def measure(out: str) -> int:
    """Run rows on the real card that is there, and write what they took."""
    if not torch.cuda.is_available():
        print("error: --measure wants a real CUDA device, and there is none", file=sys.stderr)
        return 2
    rows = []
    for row in FRESH:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            allocated, reserved = peaks(row, whole=False)
        except NotRun as why:
            print(f"{row['model']} not run: {why}")
            continue
        done = {**row, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        rows.append({**done, "allocated": allocated - before, "reserved": reserved})
        print(rows[-1], flush=True)
    Path(out).write_text(json.dumps({"t4": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def main() -> int:
    """Run the rows; the exit code."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("tables", nargs="*", metavar="t4|xmem", help="the lists of rows to run (all)")
    made.add_argument("--data", type=Path, default=DATA, help="a file shaped as cuda_peaks.json")
    made.add_argument("--max-median", type=float, metavar="PCT", help="exit 1 where the median error is larger")
    made.add_argument("--max-worst", type=float, metavar="PCT", help="exit 1 where the worst error is larger")
    made.add_argument("--measure", metavar="FILE", help="measure rows on a real card and write them")
    options = made.parse_args()
    if options.measure:
        return measure(options.measure)
    try:
        data = json.loads(options.data.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"error: {options.data}: {error}", file=sys.stderr)
        return 2
    wanted = options.tables or [name for name in ("t4", "xmem") if name in data]
    unknown = [name for name in wanted if not isinstance(data.get(name), list)]
    if unknown:
        print(f"error: {options.data} has no list {unknown[0]!r}", file=sys.stderr)
        return 2
    with contextlib.suppress(ImportError):
        transformers = importlib.import_module("transformers")
        for name in {row.get("model", "") for table in wanted for row in data[table]} & _MODELS.keys():
            getattr(transformers, _MODELS[name][1], None)  # its module is imported here: no row pays for that
    errors: list[float] = []
    beside: list[float] = []
    total = 0
    for table in wanted:
        for row in data[table]:
            total += 1
            found = show(table, row)
            errors += [abs(error) for error in found[:1]]
            beside += [abs(error) for error in found[1:]]
    if beside:
        print(f"reserved: median {statistics.median(beside):.2f} %, worst {max(beside):.2f} %")
    if not errors:
        print(f"0 of {total} rows run")
        return 1
    median, worst = statistics.median(errors), max(errors)
    print(f"{len(errors)} of {total} rows run: median error {median:.2f} %, worst {worst:.2f} %")
    past = (options.max_median is not None and median > options.max_median) or (
        options.max_worst is not None and worst > options.max_worst
    )
    return 1 if past else 0


if __name__ == "__main__":
    sys.exit(main())
