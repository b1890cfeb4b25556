"""What ``examples/train_gpt.py`` is made of: model, text, learning rate, options."""

from __future__ import annotations

import copy
import hashlib
import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from train_gpt import evaluate, learning_rate  # noqa: E402

from gpt.model import GPT, Shape, digest  # noqa: E402
from gpt.optimizers import Joined, make_inner  # noqa: E402
from gpt.options import Options, complete, make_parser, parse  # noqa: E402
from gpt.text import Text, is_held_out, load  # noqa: E402

SHAPE = Shape(width=16, layers=2, heads=2, context=12)

# --- the model -------------------------------------------------------------------------------


def test_shape_and_size() -> None:
    model = GPT(SHAPE)
    assert model(torch.zeros(3, 12, dtype=torch.int64)).shape == (3, 12, 256)
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 256)
    block = 2 * 2 * 16 + 16 * (3 * 16 + 16) + 2 * 16 * 64  # norms, attention, thought
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 256 * 16 + 12 * 16 + 2 * block + 2 * 16  # the head is the embedding


def test_a_byte_changes_nothing_before_it() -> None:
    model = GPT(SHAPE, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that what is mixed in counts
        text = torch.arange(12)[None]
        before = model(text)
        text[0, 7] = 200
        after = model(text)
    assert torch.equal(before[0, :7], after[0, :7])
    assert ((before[0, 7:] - after[0, 7:]).abs().amax(1) > 1e-3).all()


def test_a_new_model_knows_nothing() -> None:
    text = torch.arange(26).reshape(2, 13)
    assert GPT(SHAPE).loss(text).item() == pytest.approx(math.log(256), abs=0.02)


def test_the_loss_is_that_of_the_next_byte() -> None:
    model = GPT(SHAPE, seed=1)
    text = torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        chances = torch.softmax(model(text[:, :2]).double(), 2)
        expected = -(math.log(chances[0, 0, 5]) + math.log(chances[0, 1, 7])) / 2
        assert model.loss(text).item() == pytest.approx(expected, rel=1e-5)


def test_the_seed_alone_decides_how_it_begins() -> None:
    torch.default_generator.manual_seed(1)
    first = digest(GPT(SHAPE, seed=4).parameters())
    torch.default_generator.manual_seed(2)
    assert digest(GPT(SHAPE, seed=4).parameters()) == first
    assert digest(GPT(SHAPE, seed=5).parameters()) != first


def test_what_adds_to_the_stream_begins_smaller() -> None:
    model = GPT(Shape(width=64, layers=8, heads=2, context=12))
    scales = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    assert scales["bytes.weight"] == pytest.approx(0.02, rel=0.05)
    assert scales["blocks.5.queries_keys_values.weight"] == pytest.approx(0.02, rel=0.05)
    for name in ("blocks.5.attended.weight", "blocks.5.thought.2.weight"):
        assert scales[name] == pytest.approx(0.02 / 4, rel=0.05)


def test_writes_so_many_bytes() -> None:
    model = GPT(SHAPE)
    written = model.write(20, prompt=b"abc", seed=1)
    assert written.startswith("abc")
    assert written == model.write(20, prompt=b"abc", seed=1)
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.copy_(100 * model.bytes.weight[65])  # it can only think of A
    assert model.write(20, prompt=b"abc", heat=0.01) == "abc" + 20 * "A"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((10, 1, 3, 8), "width 10 is not a multiple of 3 heads"), ((8, 0, 2, 8), "positive sizes")],
)
def test_impossible_shapes(sizes: tuple[int, int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shape(*sizes)


def test_the_digest_sees_each_bit() -> None:
    tensor = torch.tensor([1.0, -0.0])
    expected = hashlib.sha256(b"\x00\x00\x80\x3f\x00\x00\x00\x80").hexdigest()[:16]
    assert digest([tensor]) == expected
    assert digest([tensor[:1], tensor[1:]]) == expected
    assert digest([torch.tensor([1.0, 0.0])]) != expected
    digest([torch.tensor(3.0), torch.zeros(2, 3).T, torch.zeros(2, dtype=torch.bfloat16)])


# --- the text --------------------------------------------------------------------------------


def names_in(text: bytes, marks: dict[str, bytes]) -> set[str]:
    return {name for name, mark in marks.items() if mark in text}


def make_folder(folder: Path) -> dict[str, bytes]:
    """Sixty files, each of which says who it is."""
    marks: dict[str, bytes] = {}
    for number in range(60):
        name = f"part{number % 3}/file{number}.txt"
        marks[name] = f"<{number}>".encode()
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(marks[name])
    return marks


def test_every_file_is_in_one_part(tmp_path: Path) -> None:
    marks = make_folder(tmp_path)
    text = load(tmp_path, 8)
    training, held_out = (
        names_in(part.tobytes(), marks) for part in (text.training, text.held_out)
    )
    assert training & held_out == set()
    assert training | held_out == set(marks)
    assert held_out == {name for name in marks if is_held_out(name)}
    assert len(text.training) + len(text.held_out) == sum(len(m) + 1 for m in marks.values())


def test_the_split_is_that_of_the_paths() -> None:
    """By SHA-256: below a tenth of what its first 32 bits can be."""
    names = [f"folder/{number}.py" for number in range(2000)]
    first = {name: int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) for name in names}
    assert [is_held_out(name) for name in names] == [first[name] < 429496730 for name in names]
    assert 150 < sum(map(is_held_out, names)) < 250


def test_the_same_wherever_the_folder_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_folder(tmp_path / name)
    one, two = load(tmp_path / "one", 8), load(tmp_path / "two", 8)
    assert one.training.tobytes() == two.training.tobytes()
    assert one.held_out.tobytes() == two.held_out.tobytes()


def test_only_text_is_read(tmp_path: Path) -> None:
    marks = make_folder(tmp_path)
    (tmp_path / ".hidden").write_bytes(b"<secret>")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"<secret>")
    for number in range(20):
        (tmp_path / f"binary{number}").write_bytes(b"<secret>\0")
    text = load(tmp_path, 8)
    everything = text.training.tobytes() + text.held_out.tobytes()
    assert b"secret" not in everything
    assert names_in(everything, marks) == set(marks)


def test_too_little_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 bytes for training, but the model needs at least 9"):
        load(tmp_path, 9)
    with pytest.raises(ValueError, match="none is not a folder"):
        load(tmp_path / "none", 9)


def test_the_standard_library_is_enough(tmp_path: Path) -> None:
    text = load(None, 129)
    assert len(text.training) > 5_000_000
    assert 0.02 < len(text.held_out) / len(text.training) < 0.4
    argparse = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    part = text.held_out if is_held_out("argparse.py") else text.training
    assert argparse + b"\0" in part.tobytes()


COUNTED = Text(np.arange(200, dtype=np.uint8), np.arange(100, 111, dtype=np.uint8))


def test_batches_are_excerpts_and_belong_to_seed_peer_and_step() -> None:
    batch = COUNTED.batch(4, 10, seed=1, peer=2, step=3)
    assert batch.dtype == torch.int64
    assert batch.shape == (4, 10)
    assert torch.equal(batch, batch[:, :1] + torch.arange(10))
    assert torch.equal(batch, COUNTED.batch(4, 10, seed=1, peer=2, step=3))
    others = [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)]
    for seed, peer, step in others:
        assert not torch.equal(batch, COUNTED.batch(4, 10, seed=seed, peer=peer, step=step))
    many = COUNTED.batch(5000, 199, seed=0, peer=0, step=0)
    assert set(many[:, 0].numpy()) == {0, 1}  # both places where so many bytes fit


def test_held_out_excerpts_are_spread_evenly() -> None:
    found = COUNTED.held_out_excerpts(3, 7)
    assert torch.equal(found, torch.tensor([[100], [102], [104]]) + torch.arange(7))


def test_a_mean_over_all_excerpts() -> None:
    model = GPT(SHAPE, seed=1)
    held_out = COUNTED.held_out_excerpts(5, 8)
    with torch.no_grad():
        one_by_one = [model.loss(held_out[at : at + 1]).item() for at in range(5)]
    assert evaluate(model, held_out, 2) == pytest.approx(sum(one_by_one) / 5, rel=1e-5)


# --- the learning rate -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (8, 0.55), (12, 0.1), (1000, 0.1)]
)
def test_learning_rate(step: int, rate: float) -> None:
    assert learning_rate(step, peak=1.0, warm_up=4, steps=12) == pytest.approx(rate, rel=1e-12)


def test_learning_rate_without_a_warm_up_or_with_nothing_else() -> None:
    assert learning_rate(0, peak=0.5, warm_up=0, steps=10) == 0.5
    rates = [learning_rate(step, peak=1.0, warm_up=2, steps=2) for step in range(3)]
    assert rates == [0.5, 1.0, 1.0]


# --- the options -----------------------------------------------------------------------------


def completed(*words: str, peers: int = 1, index: str | None = None) -> Options:
    return complete(make_parser().parse_args(words), peers, index, in_run=peers > 1)


@pytest.mark.parametrize(
    ("words", "pipeline"),
    [
        ("--mode sync --sync-every 60", (0, 1, 0.0)),
        ("--mode delayed --sync-every 60", (60, 1, 0.0)),
        ("--mode eager --sync-every 60", (60, 1, 0.0)),
        ("--mode streaming --sync-every 60", (15, 4, 0.5)),
        ("--mode streaming --sync-every 2", (1, 4, 0.5)),
        ("--mode streaming --sync-every 60 --fragments 2 --mixing 0", (30, 2, 0.0)),
        ("--mode streaming --sync-every 30s --delay 0", (0, 4, 0.5)),
        ("--mode sync --sync-every 30s --delay 7 --mixing 0.25", (7, 1, 0.25)),
    ],
)
def test_modes_are_presets(words: str, pipeline: tuple[int, int, float]) -> None:
    given = completed(*words.split())
    assert (given.delay, given.fragments, given.mixing) == pipeline


def test_what_launch_says() -> None:
    given = completed("--log", "run-{peer}.jsonl", "--sample", "9", peers=4, index="2")
    assert (given.peer, given.min_peers, given.threads, given.sample) == (2, 4, 1, 0)
    assert given.log == Path("run-2.jsonl")
    first = completed("--sample", "9", "--threads", "2", "--min-peers", "3", peers=4, index="0")
    assert (first.peer, first.min_peers, first.threads, first.sample) == (0, 3, 2, 9)
    alone = completed("--log", "run.jsonl", "--sample", "9")
    assert (alone.peer, alone.min_peers, alone.threads, alone.sample) == (0, 1, None, 9)


def test_who_joins_by_hand_draws_data_of_its_own() -> None:
    given = make_parser().parse_args([])
    peers = {complete(given, 1, None, in_run=True).peer for _ in range(8)}
    assert len(peers) > 1


def test_tokens_are_steps_of_whole_batches() -> None:
    given = completed("--tokens", "10000", "--batch", "4", "--context", "100")
    assert (given.steps, given.tokens_per_step) == (25, 400)
    assert completed("--tokens", "1").steps == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--log run.jsonl", "--log run.jsonl is one path for 2 peers: put {peer} into it"),
        ("--mode delayed --sync-every 30s", "--sync-every 30s with --mode delayed needs --delay"),
        ("--width 30 --heads 4", "width 30 is not a multiple of 4 heads"),
        ("--steps 0", "argument --steps: 0 is less than 1"),
        ("--sync-every -5", "argument --sync-every: -5 is less than 1"),
        ("--steps 5 --tokens 5", "not allowed with argument"),
        ("--warm-up -1", "argument --warm-up: -1 is less than 0"),
    ],
)
def test_mistakes_are_said_in_one_line(
    words: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCCL_PEERS", "2")
    monkeypatch.setenv("PCCL_PEER_INDEX", "1")
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


# --- the optimizers --------------------------------------------------------------------------


def stepped(model: Any, *optimizers: Any, steps: range) -> list[Any]:
    """The parameters after these steps, each with gradients of its own."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_joined_optimizers_step_as_they_do_apart_and_resume() -> None:
    alone: Any = GPT(SHAPE)
    model: Any = GPT(SHAPE)
    resumed: Any = GPT(SHAPE)
    first, *others = alone.parameters()
    apart = torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)
    wanted = stepped(alone, *apart, steps=range(4))

    def joined(of: Any) -> Joined:
        one, *more = of.parameters()
        return Joined(torch.optim.SGD([one], lr=0.1, momentum=0.9), torch.optim.Adam(more, lr=0.01))

    optimizer = joined(model)
    stepped(model, optimizer, steps=range(2))
    resumed.load_state_dict(model.state_dict())
    after = joined(resumed)
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (resumed, after)):
        assert all(map(torch.equal, stepped(one, its, steps=range(2, 4)), wanted))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model: Any = GPT(SHAPE)
    inner: Any = make_inner(model, "muon", 0.01)
    muon, adamw = ({id(one) for one in group["params"]} for group in inner.param_groups)
    names = {name for name, one in model.named_parameters() if id(one) in muon}
    matrices = ("queries_keys_values", "attended", "thought.0", "thought.2")
    assert names == {f"blocks.{block}.{name}.weight" for block in (0, 1) for name in matrices}
    assert len(muon | adamw) == len(list(model.parameters()))
