"""How byte-level BPE models cut a text into words before merging, by the name that GGUF gives it.

Each entry is a sequence of regular expressions (Oniguruma syntax); every one cuts the pieces that
the ones before it left, into its matches and what lies between them. The expressions are those of
the models' own `tokenizer.json`, the names those of llama.cpp's `tokenizer.ggml.pre`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letters: str = r"\p{L}", others: str = r"[^\s\p{L}\p{N}]") -> str:
    """The family that OpenAI's cl100k_base started: contractions, words, digits, the rest."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?{others}+[\r\n]*|{_SPACES}"
    )


def _o200k(digits: str, suffix: str) -> str:
    """The family of o200k_base: words are cut where lower case turns to upper case."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_CJK_AND_MORE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-"
    "\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943]+"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_CASED_LETTERS}",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    # Only the start of a run of spaces can match: the same cuts in linear time.
    r"(?<!\s)\s+$",
    _CJK_AND_MORE,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_MORE, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How one family of models cuts words, and what else its name settles."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token as it stands is not merged from its bytes."""
    add_bos: bool = False
    """Default where the metadata does not say."""


_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer(patterns=(_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (PreTokenizer(patterns=(_cl100k(r"\p{N}{1,3}"),)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (
        PreTokenizer(patterns=(_cl100k(r"\p{N}"),)),
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2 solar-open",
    ),
    (
        PreTokenizer(
            patterns=(_cl100k(r"\p{N}", letters=r"[\p{L}\p{M}]", others=r"[^\s\p{L}\p{M}\p{N}]"),)
        ),
        "qwen35",
    ),
    (
        PreTokenizer(patterns=(r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
    ),
    (
        PreTokenizer(patterns=(_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion gigachat a.x-4.0 exaone4 granite-docling mellum",
    ),
    (PreTokenizer(patterns=_DEFAULT), "default"),
    (PreTokenizer(patterns=_FALCON), "falcon"),
    (PreTokenizer(patterns=_DEEPSEEK_LLM), "deepseek-llm"),
    (PreTokenizer(patterns=_DEEPSEEK_CODER), "deepseek-coder"),
    (PreTokenizer(patterns=_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (
        PreTokenizer(patterns=(_o200k(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
        "tekken",
    ),
    (
        PreTokenizer(patterns=(_o200k(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
        "gpt-4o llama4 kanana2 minimax-m2",
    ),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: family for family, names in _FAMILIES for name in names.split()}
)
