"""Pre-tokenizers: how byte-level vocabularies cut text before they merge, by the name in a GGUF file (`tokenizer.ggml.pre`).

Sources: the names of `llama-vocab.cpp`, and the expressions of the models' own tokenizers. Names are left out where the vocabulary isn't byte-level
(`gemma4`, `sarvam-moe`, `granite-embed-multi-311m`, `whitespace`).
"""

from __future__ import annotations

from typing import Final

_GPT2_CUT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3_CUT: Final = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2_CUT: Final = rf"{_SHORT}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"


def _cased(upper: str = _UPPER, lower: str = _LOWER, ending: str = f"{_SHORT}?", digits: str = r"\p{N}{1,3}", last: str = "/") -> str:
    """Return GPT-4o's expression, in which a capital after small letters begins a new word, with the given parts replaced."""
    words = f"{_BEFORE}{upper}*{lower}+{ending}|{_BEFORE}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{last}]*|{_SPACES}"


_TEKKEN_CUT: Final = _cased(ending="", digits=r"\p{N}")
_HAN: Final = r"&&[^\p{Han}]]"
_KIMI_CUT: Final = r"\p{Han}+|" + _cased(_UPPER[:-1] + _HAN, _LOWER[:-1] + _HAN, last="")
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + _SPACES,
)
_THREES: Final = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Digits in groups of three, counted from the last digit."""
_EAST_ASIA: Final = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_CASED_LETTER: Final = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab68"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001dfff]]"
)
"""Letters with two cases, without the scripts that the tokenizer's authors did not list."""
_HAN_KANA_HANGUL: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SPARK: Final = (*_DEEPSEEK3[:2], _DEEPSEEK3[2].replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+", r"[\p{P}\p{S}]+|[\r\n]"), r"\p{N}")
_BLOOM_CUT: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_YOUTU_SCRIPTS: Final = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_JAIS2_SPACES: Final = "|".join([*(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s"])

_LLAMA3: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
_QWEN2: Final = ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2")
_GPT2: Final = (
    *("gpt-2", "phi-2", "olmo", "a.x-4.0", "mellum", "mpt", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "modern-bert"),
    *("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
)
_DIGITS: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
CUTS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(_GPT2, (_GPT2_CUT,)),
    **dict.fromkeys(_DIGITS, (r"\p{N}", _GPT2_CUT)),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_KANA_HANGUL, r"\p{N}"),
    "deepseek-llm": (
        *("[\r\n]", rf"\s?{_CASED_LETTER}+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$"),
        *(_HAN_KANA_HANGUL, r"\p{N}+"),
    ),
    "afmoe": (_THREES, _EAST_ASIA, _DEEPSEEK3[2]),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": _SPARK,
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3_CUT,)),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3_CUT.replace("{1,3}", "+")),
    "jais-2": (rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_JAIS2_SPACES}",),
    **dict.fromkeys((*_QWEN2, "stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2_CUT,)),
    "qwen35": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    "ufakzeka": (_QWEN2_CUT.removeprefix(f"{_SHORT}|"),),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2_CUT),
    "seed-coder": (rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    "exaone-moe": (
        rf"{_SHORT}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "tekken": (_TEKKEN_CUT,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"), (_cased(),)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _cased())),
    "youtu": (_YOUTU_SCRIPTS, _cased(digits=r"\p{N}")),
    "kimi-k2": (_KIMI_CUT,),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_CUT, r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (_BLOOM_CUT,)),
    "viking": (_BLOOM_CUT, r"\p{N}"),
    "chameleon": (
        *(r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )"),
        *(r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2_CUT),
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_CUT, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""Regular expressions that cut text, applied one after the other, by the name of the pre-tokenizer."""
STARTS: Final = frozenset({*_LLAMA3, "tekken", "chameleon"})
"""Names of pre-tokenizers with a first token before each text, for files that do not say."""
IGNORE_MERGES: Final = frozenset({*_LLAMA3, "tekken", "youtu", "minicpm5", "granite-embed-multi-97m"})
"""Names of pre-tokenizers where a piece that is a token is taken whole, without merges."""
NORMALIZED: Final = frozenset({*_QWEN2, "qwen35"})
"""Names of pre-tokenizers of models that bring text to NFC first."""
