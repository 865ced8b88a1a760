"""The table of cuts: the names that llama.cpp knows, and what the expressions do."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from paceline.store.cuts import CUTS, IGNORE_MERGES, NORMALIZED, STARTS

NAMES = """
default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano deepseek-llm deepseek-coder deepseek-v3 spark2_5
youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4
granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35
stablelm2 olmo dbrx smaug-bpe poro-chat glm4 chatglm-bpe viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe chameleon
minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion granite-docling bailingmoe bailingmoe2
llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka grok-2 afmoe laguna minimax-m2 solar-open mellum2
"""
"""Of `llama-vocab.cpp`, in its order."""
REFUSED = {"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"}
TEXT = "Hello, I'LL don't 12345 caf\u00e9\r\n\n  x=1;//a \u4e2d\u6587\u304b\u306a \uac00\ub098 e\u0301 TwoWords/\n   end  "


def pieces(name: str, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in CUTS[name]]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


def test_the_names_are_those_of_llama_cpp() -> None:
    assert set(CUTS) == set(NAMES.split()) - REFUSED
    assert set(CUTS) >= IGNORE_MERGES | NORMALIZED | STARTS


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_loses_nothing(name: str) -> None:
    assert "".join(pieces(name, TEXT)) == TEXT


@pytest.mark.parametrize(
    ("name", "text", "cut"),
    [
        ("seed-coder", "a1/\n b", ["a", "1", "/", "\n", " b"]),
        ("qwen2", "a1/\n b", ["a", "1", "/\n", " b"]),
        ("qwen35", "e\u0301 1", ["e\u0301", " ", "1"]),
        ("ufakzeka", "don't", ["don", "'t"]),
        ("ufakzeka", "Ay'de", ["Ay", "'de"]),
        ("llama4", "TwoWords I'LL 1234", ["Two", "Words", " I'LL", " ", "123", "4"]),
        ("deepseek-v3", "x 12345 \u4e2d\u6587 _ab", ["x", " ", "123", "45", " ", "\u4e2d\u6587", " _", "ab"]),
        ("tiny_aya", "12345", ["12", "345"]),
        ("afmoe", "a1234567b 12 \u0e40\u4e2d\u6587_x", ["a", "1", "234", "567", "b", " ", "12", " ", "\u0e40\u4e2d\u6587", "_x"]),
        (
            "deepseek-llm",
            "One  two,\n1234 \u4e2d\u6587\u3002 ",
            ["One", " ", " two", ",", "\n", "1234", " ", "\u4e2d\u6587", "\u3002", " "],
        ),
        ("deepseek-llm", "\u1f7d\u10d0 \u0416", ["\u1f7d", "\u10d0", " \u0416"]),
        ("superbpe", "one two 12345", ["one two ", "12", "345"]),
        ("kimi-k2", "\u4e2d\u6587\u304b", ["\u4e2d\u6587", "\u304b"]),
        ("minicpm5", "12345", ["123", "45"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("bailingmoe", "a\n\nb'S", ["a", "\n\n", "b", "'S"]),
        ("chameleon", "a  b12", ["a", "  ", "b", "1", "2"]),
        ("bloom", "one, two", ["one", ",", " two"]),
    ],
)
def test_how_texts_are_cut(name: str, text: str, cut: list[str]) -> None:
    assert pieces(name, text) == cut
