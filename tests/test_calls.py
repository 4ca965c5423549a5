"""What the router reads of a request, in every API's names: limits, ids, and bodies with an encoding."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.calls import Api, Call, ids_given, plain_body, read_call
from shared.openai import ApiError

PROMPT_FIELDS = {
    Api.CHAT: "messages",
    Api.COMPLETION: "prompt",
    Api.RESPONSES: "input",
    Api.MESSAGES: "messages",
    Api.GENERATE: "text",
}
NAMED = [api for api in Api if api is not Api.GENERATE]  # those that must name a model


def body(api: Api, **more: object) -> bytes:
    prompt = [{"role": "user", "content": "hi"}] if PROMPT_FIELDS[api] == "messages" else "hi"
    return msgspec.json.encode({"model": "m", PROMPT_FIELDS[api]: prompt, **more})


def refused(data: bytes, api: Api = Api.CHAT, status: int = 400) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_call(data, api)
    assert caught.value.status == status
    return caught.value


# ---------------------------------------------------------------------- fields


@pytest.mark.parametrize("api", Api)
def test_every_api_is_read(api):
    call = read_call(body(api, stream=True, unknown={"a": [1]}), api)
    assert (call.model, call.stream, call.output_limit, call.choices) == ("m", True, None, 1)
    assert read_call(body(api), api).stream is False
    assert not read_call(body(api, stream=None), api).stream


@pytest.mark.parametrize(
    ("api", "fields", "limit"),
    [
        (Api.CHAT, {"max_tokens": 7}, 7),
        (Api.CHAT, {"max_completion_tokens": 5}, 5),
        (Api.CHAT, {"max_completion_tokens": 5, "max_tokens": 7}, 5),
        (Api.CHAT, {"max_completion_tokens": None, "max_tokens": 7}, 7),
        (Api.COMPLETION, {"max_tokens": 1}, 1),
        (Api.RESPONSES, {"max_output_tokens": 9}, 9),
        (Api.MESSAGES, {"max_tokens": 4096}, 4096),
        (Api.GENERATE, {"sampling_params": {"max_new_tokens": 3, "temperature": 0.1}}, 3),
        (Api.GENERATE, {"sampling_params": {"max_new_tokens": 0}}, 0),
        (Api.GENERATE, {"sampling_params": None}, None),
        (Api.GENERATE, {"sampling_params": {}}, None),
    ],
)
def test_limits_have_one_name(api, fields, limit):
    assert read_call(body(api, **fields), api).output_limit == limit


@pytest.mark.parametrize(
    ("api", "fields", "choices"),
    [
        (Api.CHAT, {"n": 4}, 4),
        (Api.COMPLETION, {"n": None}, 1),
        (Api.GENERATE, {"sampling_params": {"n": 3}}, 3),
        (Api.GENERATE, {"sampling_params": {"n": None}}, 1),
    ],
)
def test_choices_have_one_name(api, fields, choices):
    assert read_call(body(api, **fields), api).choices == choices


@pytest.mark.parametrize(
    ("api", "name"),
    [
        (Api.CHAT, "max_tokens"),
        (Api.CHAT, "max_completion_tokens"),
        (Api.COMPLETION, "max_tokens"),
        (Api.RESPONSES, "max_output_tokens"),
        (Api.MESSAGES, "max_tokens"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, -(10**18)])
def test_limits_below_one_are_refused_by_their_name(api, name, value):
    error = refused(body(api, **{name: value}), api)
    assert (error.param, error.code) == (name, "invalid_value")
    assert name in error.message and str(value) in error.message


def test_a_negative_limit_of_generate_is_refused():
    error = refused(body(Api.GENERATE, sampling_params={"max_new_tokens": -1}), Api.GENERATE)
    assert error.param == "sampling_params.max_new_tokens"


@pytest.mark.parametrize("n", [0, -1])
def test_less_than_one_choice_is_refused(n):
    assert refused(body(Api.CHAT, n=n)).param == "n"


@pytest.mark.parametrize("n", [-1, -3])
def test_less_than_one_choice_is_refused_in_sampling_params_too(n):
    refused(body(Api.GENERATE, sampling_params={"n": n}), Api.GENERATE)


@pytest.mark.parametrize("api", NAMED)
def test_a_model_is_needed(api):
    for data in (body(api, model=""), msgspec.json.encode({PROMPT_FIELDS[api]: "hi"})):
        assert refused(data, api).code == "missing_model"


def test_generate_needs_no_model():
    assert read_call(b'{"text": "hi"}', Api.GENERATE).model == ""
    assert read_call(b'{"input_ids": [1]}', Api.GENERATE).model == ""


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("nothing", [b"", b": null", b": []", b': ""', b":  [] "])
def test_a_prompt_is_needed(api, nothing):
    field = PROMPT_FIELDS[api]
    part = b', "%s"%s' % (field.encode(), nothing) if nothing else b""
    assert refused(b'{"model": "m"' + part + b"}", api).param == field


@pytest.mark.parametrize("api", Api)
def test_another_apis_prompt_is_none(api):
    others = {"messages", "prompt", "input", "text"} - {PROMPT_FIELDS[api]}
    refused(msgspec.json.encode({"model": "m"} | dict.fromkeys(others, "hi")), api)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": [1]}, "n"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": "1"}}, "sampling_params.max_new_tokens"),
    ],
)
@pytest.mark.parametrize("api", Api)
def test_a_wrong_type_is_refused_by_its_name(api, fields, param):
    assert refused(body(api, **fields), api).param == param


def test_fields_that_only_hint_may_be_anything():
    odd = {"metadata": 5, "nvext": [], "program_id": {}, "prompt_cache_key": None, "session_id": 1.5}
    call = read_call(body(Api.CHAT, **odd, conversation=[1], previous_response_id={}), Api.CHAT)
    assert bytes(call.metadata) == b"5" and bytes(call.session_id) == b"1.5"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"  \n", b"null", b"5", b"[]", b'"{}"', b"{", b"{}{}", b'{"model": }', b"\xef\xbb\xbf{}", b"\xff\xfe",
        b'{"model": "m", "messages": [1]} x', b'{"model": "\xff", "messages": [1]}', b"{'model': 1}", b"\x00",
    ],
)  # fmt: skip
@pytest.mark.parametrize("api", Api)
def test_what_is_no_json_object_is_refused(api, data):
    refused(data, api)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60), st.sampled_from(list(Api)))
def test_any_bytes_are_a_call_or_refused(data, api):
    for text in (data, b'{"model": "m", "messages": ' + data + b"}"):
        try:
            assert isinstance(read_call(text, api), Call)
        except ApiError as error:
            assert error.status == 400


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(Call.__struct_fields__), JSON), st.sampled_from(list(Api)))
def test_any_values_are_a_call_or_refused(fields, api):
    try:
        call = read_call(json.dumps(fields).encode(), api)
        assert call.output_limit is None or call.output_limit >= 0
        ids_given(call, api, 4096)
    except ApiError as error:
        assert error.status == 400


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize(
    "field", ["messages", "prompt", "input", "text", "input_ids", "metadata", "elsewhere"]
)
@pytest.mark.parametrize("mark", [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_breaks_nothing(field, depth, mark):
    deep = (mark[0] * depth + "1" + mark[1] * depth).encode()
    for api in Api:
        known = dict.fromkeys(("messages", "prompt", "input", "text", "input_ids"), b"[1]") | {field: deep}
        text = b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in known.items())
        for end in (b"}", b""):
            try:
                ids_given(read_call(b'{"model": "m", ' + text + end, api), api, 4096)
            except ApiError as error:
                assert error.status == 400


@pytest.mark.parametrize("digits", [19, 20, 40, 400, 5000, 100_000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_huge_numbers_are_numbers_or_refused(digits, sign):
    number = sign + "1" + "0" * digits
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "elsewhere"):
        try:
            read_call(f'{{"model": "m", "prompt": "x", "{name}": {number}}}'.encode(), Api.COMPLETION)
        except ApiError as error:
            assert error.status == 400 and error.param in (name, None)
        else:
            assert name == "elsewhere" or not sign


def test_a_number_of_choices_that_no_message_can_hold_is_refused():
    """What a request needs is told to other routers as an integer of 64 bits."""
    for n in (2**63, 10**30):
        assert refused(body(Api.CHAT).replace(b'"model"', b'"n": %d, "model"' % n)).param == "n"


# ---------------------------------------------------------------------- ids


def call_with(api: Api, field: str, value: str) -> Call:
    return read_call(f'{{"model": "m", "text": "t", "{field}": {value}}}'.encode(), api)


@pytest.mark.parametrize(("api", "field"), [(Api.COMPLETION, "prompt"), (Api.GENERATE, "input_ids")])
def test_ids_that_are_given_are_taken(api, field):
    for text in ("[1, 2, 3]", "[[1,2,3]]", " [ 1 ,2,3 ] "):
        ids = ids_given(call_with(api, field, text), api, 4096)
        assert ids.tolist() == [1, 2, 3] and ids.dtype == "int32"
    for text in ("[1, -2]", "[2147483648]", "[1.5]", '[1, "a"]', "[[1], [2]]", "[true]", f"[{'9' * 50}]"):
        with pytest.raises(ApiError) as caught:
            ids_given(call_with(api, field, text), api, 4096)
        assert caught.value.status == 400


def test_text_is_a_workers_to_tokenize():
    assert ids_given(call_with(Api.COMPLETION, "prompt", '"1, 2"'), Api.COMPLETION, 4096) is None
    assert ids_given(call_with(Api.COMPLETION, "prompt", '["one"]'), Api.COMPLETION, 4096) is None
    for nothing in ("null", "[]", '""'):
        assert ids_given(call_with(Api.GENERATE, "input_ids", nothing), Api.GENERATE, 4096) is None
    for api in (Api.CHAT, Api.RESPONSES, Api.MESSAGES):
        call = read_call(b'{"model":"m","messages":[1],"input":[2],"prompt":[3],"input_ids":[4]}', api)
        assert ids_given(call, api, 4096) is None


# ---------------------------------------------------------------------- encodings


def encoded(data: bytes, encoding: str) -> bytes:
    return zlib.compress(data) if encoding == "deflate" else gzip.compress(data)


ENCODINGS = ["gzip", "x-gzip", "deflate", " GZip ", "DEFLATE"]


def unpacking_fails(data: bytes, encoding: str, limit: int = 1000) -> ApiError:
    with pytest.raises(ApiError) as caught:
        plain_body(data, encoding, limit)
    return caught.value


@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
def test_a_plain_body_stays(encoding):
    assert plain_body(b"abc", encoding, 1) == b"abc"  # the server had a look at its size


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=3000), st.sampled_from(ENCODINGS), st.integers(1, 3500))
def test_a_body_is_unpacked_up_to_the_limit(data, encoding, limit):
    packed = encoded(data, encoding.strip().lower())
    if len(data) <= limit:
        assert plain_body(packed, encoding, limit) == data
    else:
        assert unpacking_fails(packed, encoding, limit).status == 413


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [999, 1000])
def test_a_body_as_large_as_the_limit_is_taken(encoding, size):
    for data in (b"a" * size, os.urandom(size)):
        assert plain_body(encoded(data, encoding.strip().lower()), encoding, 1000) == data


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_refused_and_not_unpacked(encoding, monkeypatch):
    bomb = encoded(bytes(60 * 2**20), encoding)
    assert len(bomb) < 2**20
    tracemalloc.start()
    try:
        error = unpacking_fails(bomb, encoding, 2**20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.status, error.code) == (413, "body_too_large")
    assert peak < 8 * 2**20


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_is_cut_off_is_refused_at_every_place(encoding):
    packed = encoded(b'{"model": "m"}' * 10, encoding)
    for end in range(len(packed)):
        error = unpacking_fails(packed[:end], encoding)
        assert (error.status, error.code) == (400, "unreadable_body"), end


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "data", [b"", b"garbage", b'{"model": "m"}', b"\x1f\x8b", b"\x1f\x8b\x08\x00" + b"\xff" * 50]
)
def test_garbage_is_refused(encoding, data):
    assert unpacking_fails(data, encoding).status == 400


@pytest.mark.parametrize("at", [15, 60, -8, -5, -1])
def test_a_bit_that_flipped_is_found(at):
    packed = bytearray(gzip.compress(os.urandom(100)))
    packed[at] ^= 0x10
    assert unpacking_fails(bytes(packed), "gzip").status == 400


def test_what_follows_the_end_is_not_dropped_in_silence():
    first, second = gzip.compress(b'{"a": '), gzip.compress(b"1}")
    with_two = first + second  # RFC 1952: a file may have several members
    try:
        assert plain_body(with_two, "gzip", 1000) == b'{"a": 1}'
    except ApiError as error:
        assert error.status == 400
    assert unpacking_fails(first + b"garbage", "gzip").status == 400


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "compress", "gzip, gzip", "gzip,br", "*", "gzipp", "\u017fip"]
)
def test_another_encoding_is_unknown(encoding):
    error = unpacking_fails(gzip.compress(b"x"), encoding)
    assert (error.status, error.code) == (415, "unsupported_encoding")


@pytest.mark.parametrize(("api", "field"), [(Api.COMPLETION, "prompt"), (Api.GENERATE, "input_ids")])
def test_far_too_many_ids_are_refused_unread(api, field):
    body = b'{"model": "m", "' + field.encode() + b'": [[1' + b",1234567890" * 5000 + b"]]}"
    with pytest.raises(ApiError) as caught:
        ids_given(read_call(body, api), api, 4096)
    assert caught.value.code == "context_length_exceeded"
    text = b'{"model": "m", "' + field.encode() + b'": "' + b"1" * 90_000 + b'"}'
    if api is Api.COMPLETION:
        assert ids_given(read_call(text, api), api, 4096) is None


def test_members_are_bounded():
    from services.router.calls import MOST_MEMBERS

    assert plain_body(gzip.compress(b"ab") * MOST_MEMBERS, "gzip", 1000) == b"ab" * MOST_MEMBERS
    with pytest.raises(ApiError) as caught:
        plain_body(gzip.compress(b"") * (MOST_MEMBERS + 1), "gzip", 1000)
    assert caught.value.status == 400
