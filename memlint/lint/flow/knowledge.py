"""What the flow model knows of torch and its neighbours.

Facts of torch are checked against the installed torch by tests/lint/test_knowledge.py where torch is present. What a
method does to the graph was read in torch 2.13: tools/autograd/derivatives.yaml (`output_differentiability: [False]`),
torch/_tensor.py, and by running each on a tensor that requires grad.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

#: Tensor methods whose result carries no graph: autograd does not record them, or they leave torch.
DETACHING_METHODS = frozenset(
    """
    detach item tolist numpy argmax argmin argsort size dim ndimension numel nelement long int short byte bool
    char eq ne lt gt le ge greater less greater_equal less_equal not_equal isnan isinf isfinite isneginf
    isposinf isreal logical_and logical_or logical_not logical_xor nonzero count_nonzero allclose equal isclose
    stride data_ptr element_size get_device storage untyped_storage storage_offset is_contiguous
    is_floating_point is_complex new_zeros new_ones new_full new_empty new_tensor multinomial bitwise_and
    bitwise_or bitwise_not bincount histc nelement any all
    """.split()
)

#: Those of them whose result is no tensor.
NUMBER_METHODS = frozenset(
    """
    item tolist numpy size dim ndimension numel nelement stride data_ptr element_size get_device storage
    untyped_storage storage_offset is_contiguous is_floating_point is_complex allclose equal
    """.split()
)

#: Tensor attributes that carry no graph.
DETACHED_ATTRIBUTES = frozenset(
    """
    data shape dtype device ndim requires_grad is_leaf is_cuda layout itemsize nbytes names is_sparse training
    """.split()
)

#: Tensor methods that hand back (a view or copy of) the same thing, graph and all.
TRANSPARENT_METHODS = frozenset(
    """
    cpu cuda to float double half bfloat16 type type_as clone contiguous view reshape flatten squeeze unsqueeze
    mean sum requires_grad_ retain_grad t transpose permute expand expand_as repeat sqrt exp log abs neg square
    pow clamp clamp_min clamp_max norm sigmoid tanh relu softmax log_softmax div mul add sub true_divide divide
    multiply subtract rsub chunk split narrow select index_select gather masked_fill masked_select scatter roll
    flip std var prod cumsum view_as unbind unfold expm1 log1p sin cos round floor ceil sign trunc nan_to_num
    xpu npu pin_memory swapaxes movedim max min amax amin median topk sort logsumexp nanmean
    """.split()
)

#: Methods that give (values, indices) where they give a tuple; the indices carry no graph.
VALUES_AND_INDICES = frozenset("max min topk sort median mode kthvalue cummax cummin".split())

#: torch functions whose result carries no graph, beyond the methods above.
DETACHING_FUNCTIONS = frozenset(
    "torch." + name
    for name in """
    is_tensor tensor zeros ones full empty rand randn randint randperm arange linspace logspace eye zeros_like
    ones_like full_like empty_like rand_like randn_like randint_like from_numpy bernoulli multinomial
    tril_indices triu_indices device manual_seed save get_rng_state set_rng_state initial_seed finfo iinfo
    Generator normal is_grad_enabled searchsorted bucketize numel is_floating_point isin get_default_dtype Size
    """.split()
) | frozenset("torch." + name for name in DETACHING_METHODS)

#: Functions that make a new tensor, without a graph, of the numbers in a list, and hand a tensor on, graph and all
#: (measured on torch 2.13: `torch.Tensor([loss])` and `torch.Tensor(loss)`).
CONVERTING_FUNCTIONS = frozenset(
    "torch." + name
    for name in """
    Tensor FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor CharTensor ByteTensor
    BoolTensor as_tensor asarray
    """.split()
)

#: Functions that only pass their arguments' graphs on.
PASSING_BUILTINS = frozenset("sum max min abs pow round divmod next iter".split())

#: Builtins whose result holds nothing.
PLAIN_BUILTINS = frozenset(
    """
    float int len str bool repr format hash id isinstance issubclass hasattr type callable ord chr range print
    all any open input bytes bytearray complex dir vars hex bin ascii super slice
    """.split()
)

#: Builtins that build a container of what they are given.
CONTAINER_BUILTINS = frozenset("list tuple set frozenset dict sorted reversed".split())

#: Modules whose results hold no graph: numpy arrays, numbers, text. Passing a tensor to them reads its number.
PLAIN_MODULES = frozenset(
    """
    numpy math time os json random sys datetime logging matplotlib pandas csv re pathlib wandb string argparse
    warnings shutil glob pprint scipy sklearn seaborn loguru pickle tempfile subprocess threading
    """.split()
)

#: Callees (last part of the name) that only look at what they are given: loggers, writers, formatters, plots.
OBSERVERS = frozenset(
    """
    print info debug warning error critical exception log log_metric log_metrics log_dict add_scalar add_scalars
    add_histogram set_postfix set_postfix_str set_description set_description_str write writerow format plot
    scatter report display show bar hist join
    """.split()
)

#: Methods of lists, dicts, sets and deques that put their argument into the receiver.
COLLECTING_METHODS = frozenset("append add appendleft insert extend extendleft update setdefault push put".split())
#: of these, the ones whose argument is itself a container, whose elements are put in
SPREADING_METHODS = frozenset(["extend", "extendleft", "update"])

#: Functions that join tensors along a dimension: `x = torch.cat([x, y])` in a loop collects.
CONCATENATIONS = frozenset(
    "torch." + name for name in "cat concat concatenate stack hstack vstack dstack column_stack row_stack".split()
)

#: Context managers and decorators that switch autograd off.
GRAD_OFF = frozenset(("torch.no_grad", "torch.inference_mode"))
GRAD_ON = frozenset(("torch.enable_grad",))
#: Lightning, accelerate, transformers and torchmetrics helpers are seen by name only: they may switch it off.
MAYBE_OFF = re.compile(
    r"no_?grad|inference_?mode|disable_?grad|without_?grad|(?:eval|train(?:ing)?)_?mode|evaluating|grad_?enabled", re.I
)

#: Container constructors.
CONTAINER_TYPES = frozenset(
    (
        "collections.deque",
        "collections.defaultdict",
        "collections.OrderedDict",
        "collections.Counter",
        "collections.ChainMap",
    )
)

MODEL_NAME = re.compile(
    r"""^(?!_*(?:get|build|make|create|load|prepare|init|setup|set|save|wrap|unwrap|compile|update|train|fit|eval|evaluate
    |test|validate|register|add|new|from|to|is|has|run|print|log|check|apply|reset|configure|convert|copy|freeze)_)
    _?(?:\w+_)?(?:model|net|network|module|generator|discriminator|encoder|decoder|policy|actor|critic|backbone
    |classifier|transformer|unet|lstm|rnn|gru|gan|netg|netd|net_?[a-z]|model_?\w|ddp_model|student|teacher|dis|gen|head
    |engine|predictor|autoencoder|vae|bert|gpt|resnet)\d?$""",
    re.I | re.X,
)
LOSS_NAME = re.compile(
    r"""^(?:\w*_)?(?:criterion|criterions|criteria|crit|objective|loss|losses|loss_?fn|loss_?func|loss_?function
    |lossfn|lossfunc|mse|bce|nll|kl|ce|l1|l2|cross_entropy)(?:_\w+|\d+)?$""",
    re.I | re.X,
)
_WEIGHT_NAME = re.compile(r"weight|anneal|sched|coef|beta|alpha|gamma|lambda|factor|ratio|scale", re.I)
#: what counts of things are called
COUNT_NAME = re.compile(r"(?:^|_)(?:bs|size|count|num|n|len|length)s?$|^(?:num|n)_", re.I)
_WEIGHT_LAST = re.compile(r"(?:weight|coeff?|coefficient|beta|alpha|gamma|lambda|factor|ratio|scale)s?\d?$", re.I)
RECURRENT_NAME = re.compile(r"lstm|gru|rnn|recurrent", re.I)
OPTIMIZER_NAME = re.compile(r"opt(?:im(?:izer)?)?(?:s|_?\w{0,12}|\d)?$|^(?:\w+_)?(?:adam|adamw|sgd)(?:_\w+)?$", re.I)
SCALER_NAME = re.compile(r"scaler", re.I)
ACCELERATOR_NAME = re.compile(r"^_?(?:accelerator|fabric)$", re.I)
FABRIC_NAME = re.compile(r"^_?fabric$", re.I)
LOADER_NAME = re.compile(r"loader|dataloader|_dl$|^dl$|batches|_iter(?:ator)?$|dataset", re.I)
#: What entries of a model's result are called when they carry a graph.
OUTPUT_NAME = re.compile(r"loss|logit|out|pred|hidden|feat|emb|score|prob|value|state", re.I)
METER_NAME = re.compile(r"meter|tracker|average|avg|metric|stat", re.I)

#: What a number of micro-steps is called.
WINDOW_NAME = re.compile(
    r"""accum|accumulat|grad_?acc|\bgas\b|iter_?size|micro|virtual|n_?acc|aggregat|sub_?div|update_?freq|
    every_?n_?(?:back|step)|backward_?(?:freq|step)|batch_?mult|opt_?step_?(?:every|freq)""",
    re.I | re.X,
)

#: torch.nn classes that are losses end in this; the rest are modules.
LOSS_CLASS = re.compile(r"^torch\.nn\.(?:modules\.loss\.)?\w*Loss$")
#: torch.nn.functional losses.
LOSS_FUNCTION = re.compile(
    r"""^torch\.nn\.functional\.(?:\w*_loss|cross_entropy|binary_cross_entropy(?:_with_logits)?|kl_div|mse_loss|nll_loss
    |smooth_l1_loss)$""",
    re.X,
)
#: torch.nn modules without parameters: what they are given passes through
PLAIN_MODULE = re.compile(
    r"""^torch\.nn\.(?:Identity|Flatten|Unflatten|Softmax|LogSoftmax|Sigmoid|Tanh|GELU|SiLU|ELU|(?:Leaky)?ReLU6?|Dropout\w*
    |\w*Pool\dd|Upsample|CosineSimilarity|PairwiseDistance|\w+Pad\dd|Unfold|Fold)$""",
    re.X,
)
OPTIMIZER_CLASS = re.compile(
    r"^(?:torch\.optim\.(?!lr_scheduler)\w+|apex\.optimizers\.\w+|bitsandbytes\.optim\.\w+|transformers\.AdamW)$"
)

#: Libraries whose Trainer classes are transformers' Trainer, or built on it.
TRAINER_LIBRARIES = frozenset(
    "transformers trl sentence_transformers peft setfit optimum Trainer Seq2SeqTrainer".split()
)

#: Schedules of torch.distributed.pipelining that hand back losses with their graphs: those that split backward in two
#: detach them (torch 2.13, distributed/pipelining/_backward.py, `stage_backward_input`).
PIPELINE_SCHEDULES = frozenset(("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"))

#: Libraries whose metrics run `update` with autograd off, or detach (torchmetrics 1.9.0, metric.py,
#: `Metric._wrap_update`; ignite 0.5.4, metrics/*.py, `update` reads `output[0].detach()`). CatMetric keeps its input.
METRIC_LIBRARIES = frozenset(("torchmetrics", "ignite"))


def accelerator(qualified: str, arguments: Sequence[tuple[str, cst.BaseExpression]]) -> tuple[str, bool]:
    """What is known of an Accelerator or Fabric that is built: which it is, and whether it divides losses.

    Accelerate divides by its own number of steps, 1 unless given (1.15.0, accelerator.py, `Accelerator.backward`);
    Fabric divides nothing (2.6.6, fabric.py, `Fabric.backward`).
    """
    if qualified.endswith(".Fabric"):
        return ("fabric", False)
    for keyword, value in arguments:
        if keyword == "gradient_accumulation_plugin":
            return ("accelerate", True)
        if keyword == "gradient_accumulation_steps":
            return ("accelerate", not (isinstance(value, cst.Integer) and value.evaluated_value == 1))
    return ("accelerate", False)


#: Words of files that train or evaluate through functions of other files; all words of one entry.
HELPED_TRAINING = (("loss", "optimizer"), ("loss", "epochs"), ("loss", "batch in"))


def scales(name: str) -> bool:
    """Whether something is called like a number that a loss is multiplied with."""
    return bool(_WEIGHT_NAME.search(name)) and ("loss" not in name.lower() or bool(_WEIGHT_LAST.search(name)))
