"""`scute generate`: both forms of requests, errors that stay alone, runs that resume."""

import os
import signal
import subprocess
import sys
import time

import pytest
from files import lora_folder, model_folder, read_lines, write_lines

from scute_jax.cli import main


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    model_folder(folder / "model")
    for seed, name in enumerate(("alpha", "beta")):
        lora_folder(folder / "adapters" / name, seed)
    (folder / "adapters" / "broken").mkdir()
    return folder


def run(setup, requests, *extra, output=None, expect=0):
    requests = write_lines(setup / "requests.jsonl", requests)
    output = output or setup / f"out-{time.monotonic_ns()}.jsonl"
    args = ["generate", "--model", str(setup / "model"), "--adapters", str(setup / "adapters")]
    args += ["--requests", str(requests), "--output", str(output), *extra]
    assert main(args) == expect
    return read_lines(output)


def test_our_form_in_the_order_of_the_requests(setup):
    records = [
        {"id": "a", "prompt": "hello", "adapter": "alpha", "max_tokens": 5, "ignore_eos": True},
        {"id": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {"id": "c", "prompt_token_ids": [5, 6], "adapter": ["alpha", "beta"], "logprobs": 2},
        {"prompt": "hello", "adapter": "beta", "max_tokens": 5, "prompt_logprobs": 0},
        {"id": "e", "prompt": "hello", "max_tokens": 5, "temperature": 0.7, "seed": 4},
        {"id": "f", "prompt": "hello", "adapter": "alpha", "scale": 0, "max_tokens": 5},
        {"id": "g", "prompt": "hello", "adapter": ["alpha", "beta"], "scale": [0.5, 2]},
        {"id": "h", "prompt": "hello", "max_tokens": 5},
    ]
    out = run(setup, records, "--order", "requests")
    assert [r["id"] for r in out] == ["a", "b", "c", "line-4", *"efgh"]
    assert all(r["error"] is None for r in out)
    assert len(out[0]["token_ids"]) == 5 and out[0]["finish_reason"] == "length"
    assert out[2]["adapter"] == ["alpha", "beta"] and len(out[2]["top_logprobs"][0]) == 2
    assert out[3]["prompt_logprobs"][0] is None and len(out[3]["prompt_logprobs"]) == 5
    assert out[5]["token_ids"] == out[7]["token_ids"] != out[0]["token_ids"]
    again = run(setup, records, "--order", "requests")
    assert again == out


def test_the_openai_form(setup):
    def line(name, model, **body):
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body |= {"model": model}
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    chat = [{"role": "user", "content": "hi"}]
    out = run(
        setup,
        [
            line("1", "alpha", messages=chat, max_completion_tokens=4, logprobs=True),
            line("2", "base", prompt="hello", max_tokens=4, logprobs=1, n=1),
            line("3", "gamma", messages=chat),
            line("4", "alpha", messages=chat, presence_penalty=1),
            line("5", "model", prompt=[4, 5], max_tokens=2),
        ],
        "--order",
        "requests",
        expect=1,
    )
    first, second = (record["response"]["body"] for record in out[:2])
    assert [r["custom_id"] for r in out] == list("12345")
    assert first["choices"][0]["message"]["role"] == "assistant" and first["model"] == "alpha"
    assert len(first["choices"][0]["logprobs"]["content"]) == first["usage"]["completion_tokens"]
    assert isinstance(second["choices"][0]["text"], str)
    assert "'gamma' is neither an adapter nor the base model" in out[2]["error"]["message"]
    assert "presence_penalty=1 is not served" in out[3]["error"]["message"]
    assert out[4]["error"] is None


def test_a_bad_line_or_adapter_gives_an_error_and_the_rest_goes_on(setup):
    records = [
        "{not json",
        {"id": "x", "prompt": "a", "promt": "b"},
        {"id": "y", "prompt": "a", "temperature": -1},
        {"id": "scaled", "prompt": "a", "adapter": "alpha", "scale": [1, 2]},
        {"id": "z", "prompt": "a", "adapter": "broken"},
        {"id": "z", "prompt": "a"},
        {"id": "u", "prompt": "a", "adapter": "nobody"},
        {"id": "v", "prompt": "a", "prompt_token_ids": [1]},
        {"id": "w", "prompt_token_ids": [1, 97]},
        {"id": "ok", "prompt": "a", "max_tokens": 2},
    ]
    out = {r["id"]: r for r in run(setup, records, expect=1)}
    expected = {
        "line-1": "no JSON",
        "x": "unknown field(s) 'promt'",
        "y": "temperature must be a number from 0 to 1,000,000, not -1",
        "z": "adapter_config.json: cannot be read",
        "scaled": "2 numbers, but the request names 1 adapters",
        "line-6": "id 'z' is that of line 5",
        "u": "no adapter is called 'nobody'; there are: alpha, beta",
        "v": "exactly one of prompt, messages and prompt_token_ids",
        "w": "prompt_token_ids holds 97",
    }
    for name, message in expected.items():
        assert message in out[name]["error"] and out[name]["finish_reason"] == "error", name
    assert out["ok"]["error"] is None


def test_a_finished_output_is_not_written_over(setup, capsys):
    output = setup / "kept.jsonl"
    records = [{"id": str(i), "prompt": "a", "max_tokens": 2} for i in range(3)]
    first = run(setup, records[:2], output=output)
    run_again = ["generate", "--model", str(setup / "model"), "--output", str(output)]
    assert main([*run_again, "--requests", str(setup / "requests.jsonl")]) == 2
    assert "holds 2 results already; give --resume" in capsys.readouterr().err
    assert read_lines(output) == first
    assert [r["id"] for r in run(setup, records, "--resume", output=output)] == ["0", "1", "2"]


def test_a_killed_run_resumes_with_nothing_lost_and_nothing_twice(setup):
    records = [
        {"id": str(i), "prompt": "abc" * (i % 5 + 1), "max_tokens": 30, "ignore_eos": True}
        | ({"adapter": "alpha"} if i % 2 else {})
        for i in range(60)
    ]
    requests = write_lines(setup / "many.jsonl", records)
    output = setup / "killed.jsonl"
    command = [sys.executable, "-m", "scute_jax.cli", "generate", "--model", str(setup / "model")]
    command += ["--adapter", f"alpha={setup / 'adapters' / 'alpha'}"]
    command += ["--requests", str(requests), "--output", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (output.exists() and output.read_text().count("\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = output.read_text()
    with output.open("a") as file:
        file.write('{"id": "5')  # what a kill in the middle of a record would leave
    begun = len([line for line in whole.splitlines() if line])
    assert begun < 60
    assert main([*command[3:], "--resume"]) == 0
    out = read_lines(output)
    assert sorted((r["id"] for r in out), key=int) == [str(i) for i in range(60)]
    assert output.read_text().startswith(whole)
    fresh = setup / "fresh.jsonl"
    assert main([*command[3:-1], str(fresh)]) == 0
    texts = {r["id"]: r["token_ids"] for r in read_lines(fresh)}
    assert {r["id"]: r["token_ids"] for r in out} == texts


# A file that may not grow fails in the middle of a record, as a full disk does.
LIMITED = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
os.execv(sys.argv[1], sys.argv[1:])"""


def start(setup, requests, output, limited=False):
    """A run of its own, once it has written its first result."""
    command = [sys.executable, "-m", "scute_jax.cli", "generate", "--model", str(setup / "model")]
    command += ["--requests", str(requests), "--output", str(output)]
    command += ["--compilation-cache", str(setup / "compiled")]
    wrapped = [sys.executable, "-c", LIMITED, *command] if limited else command
    process = subprocess.Popen(wrapped, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (output.exists() and "\n" in output.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process, command


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_stops_and_the_run_resumes(setup, number):
    records = [
        {"id": str(i), "prompt": "abc", "max_tokens": 120, "ignore_eos": True} for i in range(400)
    ]
    requests = write_lines(setup / "long.jsonl", records)
    output = setup / f"stopped-{number}.jsonl"
    process, command = start(setup, requests, output)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "Go on with --resume" in errors
    assert f"{signal.Signals(number).name}: finishing what was begun" in errors
    out = read_lines(output)
    assert 0 < len(out) < 400 and all(len(r["token_ids"]) == 120 for r in out)
    kept = output.read_text()
    write_lines(requests, records[: len(out) + 20])
    compiled = {path.name for path in (setup / "compiled").glob("*-cache")}
    assert any("decode" in name for name in compiled)
    subprocess.run([*command, "--resume"], check=True, stderr=subprocess.DEVNULL)
    assert {path.name for path in (setup / "compiled").glob("*-cache")} == compiled
    assert output.read_text().startswith(kept)
    done = {r["id"] for r in read_lines(output)}
    assert done >= {r["id"] for r in records[: len(out) + 20]}


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_disk_that_fills_up_stops_the_run_and_keeps_what_was_written(setup):
    records = [{"id": str(i), "prompt": "abc", "max_tokens": 40} for i in range(60)]
    requests, output = write_lines(setup / "full.jsonl", records), setup / "full-out.jsonl"
    process, command = start(setup, requests, output, limited=True)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"{output}: File too large; results so far are kept" in errors
    assert "Traceback" not in errors
    kept = output.read_text()
    begun = read_lines(output)
    assert 3 < len(begun) < 60 and kept.endswith("\n")
    subprocess.run([*command, "--resume"], check=True, stderr=subprocess.DEVNULL)
    assert output.read_text().startswith(kept)
    assert sorted(int(r["id"]) for r in read_lines(output)) == list(range(60))


@pytest.mark.parametrize(
    "args, message",
    [
        (["--adapter", "nonsense"], "write NAME=PATH"),
        (["--adapters", "/nowhere"], "/nowhere: there is no such folder"),
        (["--requests", "/nowhere"], "/nowhere: there is no such file"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_a_wrong_call_says_why_and_does_nothing(setup, capsys, args, message):
    call = {
        "--model": str(setup / "model"),
        "--requests": str(write_lines(setup / "r.jsonl", [{"prompt": "a"}])),
        "--output": str(setup / "unused.jsonl"),
    } | dict([args])
    assert main(["generate", *(part for pair in call.items() for part in pair)]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_tokenizer_serves_token_ids(setup):
    model_folder(setup / "bare", tokenizer=False)
    out = setup / "bare.jsonl"
    requests = write_lines(
        setup / "bare-requests.jsonl",
        [{"id": "ids", "prompt_token_ids": [4, 5], "max_tokens": 2}, {"id": "text", "prompt": "a"}],
    )
    call = ["generate", "--model", str(setup / "bare"), "--requests", str(requests)]
    assert main([*call, "--output", str(out), "--order", "requests"]) == 1
    ids, text = read_lines(out)
    assert len(ids["token_ids"]) == 2 and ids["text"] == ""
    assert "has no tokenizer: give prompt_token_ids in place of prompt" in text["error"]
