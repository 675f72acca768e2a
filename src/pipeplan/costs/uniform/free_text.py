"""Free text of published runs, read by its words: what is said, what is denied, and what is not said at all.

Text is in small letters. Of a word each place where it stands counts on its own: it is denied by what stands before it
("no", "without", "non-", ...) or after it ("off", ": false", "disabled", ...) in its clause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipeplan.costs.devices import DevicePreset
from pipeplan.costs.uniform.choices import choices


class Unsaid(Exception):
    """Why our words cannot say a run."""


_CLAUSE = re.compile(r"[,;()\[\]{}+|]|\.\s|\b(?:and|but|then)\b")
_FEW = (
    r"(?:(?:a|an|the|any|use|used|using|of|in|with|is|was|it|be|do|does|did|run|running|enabled?|enabling|explicit|"
    r"activations?|act|gradients?|grad|full|selective|attention|core|layers?|pipeline|tensor|transformer|te|engine|"
    r"training|mixed|virtual|other|fp32|float32)[-\s/]+){0,3}"
)
_DENIED_BEFORE = re.compile(
    r"\b(?:no|not|non|without|never|neither|nor|disabl\w+|instead of|rather than|lacks?|lacking|omit\w*|avoid\w*|"
    r"except|exclud\w*|\w+n['’]t|un|skip\w*|turn\w* off|switch\w* off)[-\s:]*" + _FEW + "$"
)
_DENIED_AFTER = re.compile(
    r"(?:[-\s:=(\[]|is\b|was\b|are\b|were\b|has\b|been\b|set\b|to\b|turned\b|switched\b|kept\b|left\b|currently\b|"
    r"training\b|mode\b|recipe\b|gemms?\b|compute\b|schedules?\b|scheduling\b|method\b|policy\b|granularity\b|"
    r"layers?\b|num\b|1f1b\b|stages?\b|pipelin\w+|flag\b|option\b|mixed\b|precision\b|parallelism\b|"
    r"att\w*|activations?\b|userbuffers?\b|overlap\w*|comm\b|checkpoint\w*|recomput\w*|"
    r"available but\b|supported but\b)*+"
    r"(?:off|false|disabled|none|null|nothing|unused|unsupported|unavailable|inactive|deactivated|0(?![.\d])|"
    r"no(?=\s*(?:$|[,;)\]]))|not (?:used|enabled|applied|active|available|in use|supported|on|set|needed|performed))\b"
)
_UNPRINTED = re.compile(
    r"(?:not (?:re)?(?:stated|printed|specified|given|reported|known|listed|mentioned|available|published|disclosed|"
    r"documented)|unknown|unstated|unspecified|undisclosed|unclear|none|null|na|tbd)(?:\W.*)?|[-?]*"
)


def plain(text: str) -> str:
    """With spaces for underscores, one kind of hyphen, and no abbreviated denials."""
    text = re.sub(r"[‐‑‒–—−]", "-", text.lower().replace("_", " "))
    text = re.sub(r"\bw/o\b|\bw/out\b", "without", text)
    return re.sub(r"\bn[/.]a\b\.?", "none", text).strip()


def said(text: str, word: str) -> bool | None:
    """Whether a word (a regular expression) is said of plain text; False where all its places deny it, None if none."""
    found: bool | None = None
    for place in re.finditer(word, text):
        if _stands(text, place):
            return True
        found = False
    return found


def _stands(text: str, place: re.Match[str]) -> bool:
    """Whether nothing in its clause denies what is found there."""
    before = _CLAUSE.split(text[: place.start()])[-1]
    return not _DENIED_BEFORE.search(before) and not _DENIED_AFTER.match(text, place.end())


def unprinted(text: str) -> bool:
    """Whether plain text is empty, or says only that nothing is stated."""
    return _UNPRINTED.fullmatch(text) is not None


# State --------------------------------------------------------------------------------------------------------------

_BESIDE = (
    r"(?![-\s]*(?:results?|rows?|numbers|tables?|runs\b|all-?gather|comm|dispatch|optimi|adam|moment|state|kv|cache|"
    r"storage))"
)
"""What is not products."""

_EIGHT = r"(?:fp-?8|float-?8|e4m3|e5m2|8-bit float)"
_FEWER = r"(?:(?:fp|int|float|nf)-?4(?!\d)|fp-?6\b|int-?8|4-bit)"
_BFLOAT = r"bf-?16|bfloat-?16|brain ?float"
_FLOAT16 = r"(?<!b)(?:fp|float)-?16|\bf16|\bhalf\b"
_SIXTEEN = r"16[-\s]?bits?\b|\bmixed\b|16-mixed|\bamp\b|\bo[12]\b"
_WIDER = r"(?:fp|float|tf)-?(?:32|64)|32[-\s]?bit|single precision|full precision"


def recipe_meant(text: str, usual: str = "bf16-mixed") -> tuple[str, bool]:
    """The recipe of training state that free text means, and whether it is ``usual``, for it does not say a format.

    Raises:
        Unsaid: products are in no format of 8 or 16 bits.
    """
    words = plain(text)
    bfloat, float16 = said(words, _BFLOAT), said(words, _FLOAT16)
    if said(words, _EIGHT + _BESIDE) or (said(words, _EIGHT) and not bfloat and not float16):
        return "fp8-mixed", False
    if said(words, _FEWER + _BESIDE):
        raise Unsaid(f"precision {text!r}: products are in neither 8 nor 16 bits")
    if float16 and not bfloat:
        return "fp16-mixed", False
    if said(words, r"\bpure\b|bf16[-\s]true") or (bfloat and said(words, r"\bmaster\b") is False):
        return "bf16", False
    default = said(words, r"\bdefault\b") and (re.search(r"fsdp|mixed|\bamp\b", words) or not bfloat)
    if default or said(words, r"autocast|\bamp bf16|bf16 amp|torch\W?amp"):
        return "bf16-autocast", False
    if bfloat:
        return "bf16-mixed", False
    if said(words, _SIXTEEN):
        return usual, True
    denied = said(words, f"{_EIGHT}|{_FEWER}") is False
    if unprinted(words) or (denied and said(words, _WIDER) is None):
        return usual, True
    raise Unsaid(f"precision {text!r}: products are in neither 8 nor 16 bits")


def optimizer_meant(text: str) -> str | None:
    """``adamw``, ``momentum`` or ``sgd``, by what an optimizer keeps; None where the text names none of their kind.

    Adam and LAMB keep two moments of a parameter, Lion and Signum one as momentum does.
    """
    words = plain(text)
    if said(words, r"8-?bit|adafactor|adam-?mini|galore|shampoo|\bsoap\b|muon"):
        return None
    if said(words, r"adam|\blamb\b|\badan\b"):
        return "adamw"
    if said(words, r"moment(?:um)?\b|nesterov|\blion\b|signum|\blars\b"):
        return "momentum"
    return "sgd" if said(words, r"\bsgd|stochastic gradient|gradient descent") else None


def level_meant(text: str) -> int:
    """The level of sharding that the text of an optimizer names; 0 where it names none."""
    words = plain(text)
    if said(words, r"fsdp|full[-\s]?shard|hybrid[-\s]?shard|hsdp|zero\W*(?:stage\W*)?3"):
        return 0 if said(words, r"no[-\s]shard\b") else 2 if said(words, r"shard[-\s]grad[-\s]op") else 3
    for level in (2, 1):
        if said(words, rf"zero\W*(?:stage\W*)?{level}\b"):
            return level
    return int(bool(said(words, r"distributed[-\s](?:fused[-\s])?(?:optimi[sz]er|adam\w*)|zeroredundancy")))


# The pipeline -------------------------------------------------------------------------------------------------------

_NO_CLOSED_FORM = (
    r"dual-?pipe|hanayo|chimera|terapipe|\bv-?(?:half|min)\b|controllable|bitpipe|\bwave[-\s](?:like|pipe)|"
    r"bidirectional (?:pipe|sched)|\b2bw\b|\basync\w* (?:pipe|sched|1f1b|update)"
)
_ZERO_BUBBLE = (
    (r"zb-?\s?v|zero[-\s]?bubble[-\s]?v\b|v-?shaped? zero|zbvzero", "zb-v"),
    (r"zb-?\s?(?:2p|h2)|zero[-\s]?bubble\W*(?:2p|h-?2)", "zb-2p"),
    (r"zb-?\s?(?:1p|h1)|zero[-\s]?bubble|\bzb\b", "zb-1p"),
)
_INTERLEAVED = (
    r"interleav\w*|1f1b-i\b|\bvp(?=\s*[=:]?\s*\d)|\bi-?1f1b|\bvpp\b|"
    r"virtual (?:pipeline|stage)\w*|loop(?:ed|ing)|breadth-first|depth-first"
)
_ONLY_IF = re.compile(
    r"[-\s\w(]{0,24}?"
    r"(?:\b(?:if|when|where|whenever|unless)\b|\b(?:for|with|at)\b[^,;)]*(?:>|\babove|\bmore than|greater))"
)
_PLAIN = (
    r"1f1b|one[-\s]f\w*[-\s]one[-\s]b|1[-\s]forward|gpipe|afab|f-?then-?b|fill[-\s]drain|all[-\s]forward|pipedream|"
    r"dapple|deepspeed"
)
_NO_NAME = re.compile(
    r"(?:default|standard|usual|plain|megatron|lm|core|nemo|pytorch|torch|pipelines?|pipelining|parallel(?:ism)?|"
    r"schedule|scheduler|engine|framework|the|of|in|with|pp|by|from|on|for|script|recipe|synchronous|sync|flush|"
    r"single|stage|no|not)+"
)


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule, how many chunks it says a stage has, or 2 where it only says that they are several, else 1.

    ``named`` is whether the text names any schedule.
    """

    name: str
    chunks: int
    named: bool


def schedule_meant(text: str) -> NamedSchedule:
    """The schedule that free text names.

    Raises:
        Unsaid: it is one without a closed form, or none that is known.
    """
    words = plain(text)
    if said(words, _NO_CLOSED_FORM):
        raise Unsaid(f"schedule {text!r} is not one with a known closed form")
    for word, name in _ZERO_BUBBLE:
        if said(words, word):
            return NamedSchedule(name, 2 if name == "zb-v" else 1, True)
    several = any(
        _stands(words, place) and not _ONLY_IF.match(words, place.end()) for place in re.finditer(_INTERLEAVED, words)
    )
    if said(words, _PLAIN) or several or said(words, _INTERLEAVED):
        return NamedSchedule("1f1b", _chunks(words) if several else 1, True)
    denied = said(words, f"{_INTERLEAVED}|zb|zero[-\\s]?bubble") is False
    if denied or unprinted(words) or _NOTHING.match(words) or _NO_NAME.fullmatch(re.sub(r"[^a-z0-9]", "", words)):
        return NamedSchedule("1f1b", 1, denied)
    raise Unsaid(f"schedule {text!r} is not one with a known closed form")


def _chunks(words: str) -> int:
    number = re.search(r"\b(?:vpp?|v|virtual[-\s]\w+|chunks)(?:[-\s]size)?\s*[=:]?\s*([1-9]\d{0,2})\b", words)
    number = number or re.search(r"\b([1-9]\d{0,2})\s*(?:x\s*)?(?:virtual|model chunks|chunks|stages per)", words)
    return int(number.group(1)) if number else 2


# Recomputation ------------------------------------------------------------------------------------------------------

_AGAIN = r"(?:re-?comput|remat|check-?\s?point|ckpt)\w*|\bac\b"
_FULL = r"\bfull\w*|\buniform"
_SOME = r"\bevery\b|\beach\b|\bentire\b|\bwhole\b|\bblocks?\b|\ball\b|\blayers?\b|\byes\b|\bon\b|\benabled\b|\btrue\b"
_NOTHING = re.compile(
    r"(?:none|nothing|nil|never|no|off|turned off|switched off|false|disabled|null|0|"
    r"not (?:used|enabled|applied|needed|necessary|recomputed|checkpointed))"
    r"(?:\s*$|\s*[(\[,;.:]|\s+(?:for|in|is|at|on|by|recomputed|used|layers?)\b)"
)


@dataclass(frozen=True, slots=True)
class Again:
    """Shares of a forward that are computed again, of each of its parts; ``guessed`` if the text leaves them open."""

    core: float = 0.0
    up: float = 0.0
    products: float = 0.0
    elementwise: float = 0.0
    printed: bool = True
    guessed: bool = False


def _again(share: float, *, guessed: bool = False) -> Again:
    return Again(share, share, share, share, guessed=guessed)


def recomputed(text: str, layers_of_stage: float) -> Again:
    """What of a forward free text says is computed again.

    Raises:
        Unsaid: it does not say what.
    """
    words = plain(text)
    if unprinted(words) and not _NOTHING.match(words):
        return Again(printed=False)
    if _NOTHING.match(words) or re.search(r"\bno(?=re-?comp|remat|check)|otherwise no", words):
        return Again()
    if re.search(r"nothing[-\s]sav|save[-\s]nothing", words):
        return _again(1.0)
    if re.search(r"everything[-\s]sav|save[-\s]everything|\b(?:all|everything)[\s\w]* (?:kept|stored|saved)\b", words):
        return Again()
    if re.search(r"modules", words) and said(words, "modules"):
        elementwise = float(bool(re.search(r"norm|\bact\b", words)))
        core, up = float("core att" in words), float("up proj" in words)
        return Again(core, up, 0.0, elementwise, guessed=bool(re.search(r"\bmlp\b|\bmoe\b|expert", words)))
    fraction = _fraction(words, layers_of_stage)
    if fraction is not None:
        return _again(fraction)
    if re.search(r"selective\W+layer|per-block (?:frac|ratio|sel)|alternat", words):
        return _again(choices().recomputed, guessed=True)
    if re.search(r"selective\b[^,;]*\bop\b|minimal|dots (?:saveable|with)|checkpoint dots|save dots", words):
        by_operator = re.search(r"\bop\b", words)
        products = choices().recomputed if by_operator else 0.0
        return Again(0.0, 1.0, products, 1.0, guessed=by_operator is not None)
    if said(words, "selective") and re.search(r"\w*norms?\b|\bact\b|gelu|swiglu", words) and "att" not in words:
        return Again(elementwise=1.0)
    if said(words, r"selective|\bcore\b|attention\b[^,;]*\bonly\b|only (?:the )?attention"):
        return Again(core=1.0)
    if said(words, _FULL) or said(words, _AGAIN):
        return _again(1.0)
    if False in (said(words, each) for each in (_AGAIN, _FULL, r"selective|\bcore\b", _SOME)):
        return Again()
    if said(words, _SOME):
        return _again(1.0)
    raise Unsaid(f"recompute {text!r} does not say what is computed again")


_ORDINALS: Mapping[str, int] = {"second": 2, "other": 2, "third": 3, "fourth": 4}


def _fraction(words: str, layers_of_stage: float) -> float | None:
    """The share of layers that are computed again, where it is said in numbers."""
    if found := re.search(r"\bevery (second|other|third|fourth|[1-9]\d{0,2}(?:nd|rd|th))\b", words):
        each = found.group(1)
        return 1 / (_ORDINALS.get(each) or int(re.sub(r"\D", "", each)))
    if found := re.search(r"\b(\d{1,4})\s*(?:of|/)\s*(?:the |all )?([1-9]\d{0,3})\b(?=[^,;]*(?:layer|block))", words):
        return min(1.0, int(found.group(1)) / int(found.group(2)))
    if found := re.search(r"\b(\d{1,2}|100)(?:\.\d+)?\s*(?:%|percent) of[^,;]*(?:layer|block)", words):
        return int(found.group(1)) / 100
    if re.search(r"\bhalf (?:of )?(?:the |its )?(?:layers|blocks)", words):
        return 0.5
    if re.search(r"uniform|per[-\s]block", words):
        return None
    found = re.search(r"\b(\d{1,4}) layers? (?:per|of each|on each|in each) \w*\s?(?:stage|rank|chunk)", words)
    found = found or re.search(r"recomp\w* (?:num )?layers\s*[=:]?\s*(\d{1,4})\b", words)
    if not found and re.search(r"\bblock\b", words):
        found = re.search(r"\b(\d{1,4}) layers?\b", words)
    return min(1.0, int(found.group(1)) / layers_of_stage) if found else None


# Kernels and messages that hide -------------------------------------------------------------------------------------


def attention_meant(text: str) -> tuple[str | None, bool]:
    """The attention that free text names, and whether that says which version; None where it names none."""
    words = plain(text)
    flash = said(words, r"flash|\bfa-?[123]\b")
    fused = said(words, r"\bte\b|cudnn|transformer engine|\bfused(?! softmax)")
    if said(words, r"unfused|un-fused|\beager|\bmath\b|naive|(?:standard|vanilla|plain) attention"):
        return "unfused", True
    if flash and re.search(r"flash\W*(?:att\w*)?\W*v?[23]|\bfa-?[23]\b", words):
        return "flash-2", True
    if fused:
        return "cudnn", True
    if flash:
        return "flash-1", False
    if fused is False and "nvte" in words and flash is None:
        return "flash-2", True  # what Transformer Engine has beside cuDNN's
    return (None, False) if flash is None and fused is None else ("unfused", True)


_OTHER_MESSAGES = r"\btp\b|tensor|userbuffer|\bpp\b|p2p|pipeline|\bcp\b|context|expert|\bmoe\b|\bep\b|a2a|all-?to-?all"
_NOT_HIDDEN = re.compile(
    r"\b(?:no|not|without|non|never|disabl\w+)\b[^:=]*overlap|"
    r"overlap[-\s\w]*?[-\s:=]+(?:false|off|none|no|not|disabled|0)\b"
)


def hides_tensor_messages(text: str) -> bool:
    """Whether messages of tensor parallelism hide, by free text."""
    words = r"\btp[-\s](?:comm[-\s])?overlap|userbuffer|async[-\s]?tp|async tensor|tensor[-\s]parallel\w* \w*\s?overlap"
    return bool(said(plain(text), words))


def hides_gradients(text: str) -> bool | None:
    """Whether sums of gradients hide, by free text; None where it does not say."""
    words, found = plain(text), None
    if _NOTHING.match(words) and not text.startswith("n/a"):
        return False
    for clause in re.split(r"[,;()+]|\band\b|\bbut\b", words):
        if re.search(_OTHER_MESSAGES, clause):
            continue
        if re.search("overlap", clause):
            found = bool(found) or not _NOT_HIDDEN.search(clause)
    return found


# Links --------------------------------------------------------------------------------------------------------------

_NVLINK = r"nv-?link|nv-?switch|\bnvl ?\d+|\b[sh]xm\d?\b|\b[dh]gx\b|infinity fabric|xgmi|fully connected"
_PCIE = r"pci-?e|pci[-\s]express"


def link_meant(text: str, device: DevicePreset) -> float | None:
    """Bytes per second between devices of a node, by free text; None where it does not say what these links are.

    All of a device's NVLinks go to a switch where nothing else is said; a number of connections between two GPUs is as
    many links between them. Without NVLink, or where it only joins pairs, devices exchange through PCIe.
    """
    words, chosen = plain(text), choices()
    nvlink, pcie = said(words, _NVLINK), said(words, _PCIE)
    if nvlink is False or (pcie and (not nvlink or re.search(r"\bpairs?\b|pairwise|bridge", words))):
        return min(device.link_bytes_per_s, _pcie_bytes_per_s(words, device))
    if not nvlink:
        return None
    number = re.search(r"nvlink\D{0,3}(\d{1,9}) (?:inter-?gpu )?(?:connect|link)|\b(\d{1,9}) nvlinks? between", words)
    if number is None:
        return device.link_bytes_per_s
    links = int(number.group(1) or number.group(2))
    each = device.link_bytes_per_s / chosen.of_family(chosen.links, device.family, 1)
    return min(max(links, 1) * each, device.link_bytes_per_s)


def _pcie_bytes_per_s(words: str, device: DevicePreset) -> float:
    rates, chosen = choices().pcie, choices()
    found = re.search(
        r"gen\w*[-\s.]?([3-6])|pci-?e[-\s]*(?:v|gen)?[-\s.]?([3-6])(?:\.0)?\b|([3-6])(?:rd|th)[-\s]gen", words
    )
    number = next(filter(None, found.groups())) if found else str(chosen.of_family(chosen.slots, device.family, 4))
    lanes = re.search(r"\bx ?(4|8)\b", words)
    return rates[number] * (int(lanes.group(1)) / 16 if lanes else 1)
