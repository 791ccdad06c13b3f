"""Losses, the target's distributions on disk, drafts that begin as layers of their target, and cards that name a target."""

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from test_training import SHAPE, TRAIN, last_json
from transformers import AutoModelForCausalLM, TrainingArguments

import specplug
from specplug import distillation, training
from specplug.cli import run_recipe
from specplug.config import ConfigError, Distill, Draft, Dtype, Loss, Model, Quantization, QuantizationMethod
from specplug.distillation import LOSSES, TopK, log_probs, log_probs_at, with_rest
from specplug.drafters.build import build_drafter
from specplug.fingerprint import fingerprint
from specplug.models import load_model
from specplug.pruning import keep_layers, spread


def two_distributions(seed=0, shape=(5, 40)):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3 for _ in range(2))


def test_losses_against_their_definitions():
    p, q = (each.double().softmax(-1) for each in two_distributions())
    m = (p + q) / 2
    expected = {
        Loss.forward_kl: (p * (p / q).log()).sum(-1),
        Loss.reverse_kl: (q * (q / p).log()).sum(-1),
        Loss.jsd: ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        Loss.tv: 1 - torch.minimum(p, q).sum(-1),
    }
    assert set(expected) == set(LOSSES) == set(Loss)
    for loss, value in expected.items():
        torch.testing.assert_close(LOSSES[loss](p.log(), q.log()), value)
        torch.testing.assert_close(LOSSES[loss](p.log(), p.log()), torch.zeros(5, dtype=p.dtype), atol=1e-12, rtol=0)
    assert not torch.allclose(expected[Loss.forward_kl], expected[Loss.reverse_kl])  # their order matters


@pytest.mark.parametrize("loss", Loss)
def test_a_token_that_cannot_be_said_gives_no_nan(loss):
    logits, other = two_distributions()
    logits[:, 3] = float("-inf")
    other.requires_grad_()
    LOSSES[loss](log_probs(logits), log_probs(other)).mean().backward()
    assert other.grad.isfinite().all() and other.grad.abs().sum() > 0


@pytest.mark.parametrize("loss", Loss)
def test_top_k_is_a_divergence_that_grows_with_k_to_the_whole(loss):
    """What is beyond the top k counts as one token: by the data processing inequality that is never more than the whole."""
    p, q = two_distributions()
    whole = LOSSES[loss](log_probs(p), log_probs(q))
    before = torch.zeros(5)
    for top_k in (1, 4, 16, 39):
        top = log_probs(p).topk(top_k, dim=-1)
        part = LOSSES[loss](with_rest(top.values), log_probs_at(q, top.indices))
        assert (part >= before - 1e-5).all() and (part <= whole * 1.01 + 1e-5).all()  # 1 - sum in fp32
        before = part
    torch.testing.assert_close(before, whole, atol=1e-2, rtol=1e-2)
    # Negative control: renormalised over the top k, it is no longer bounded by the whole.
    top = log_probs(p).topk(4, dim=-1)
    cut = LOSSES[loss](top.values.log_softmax(-1), q.gather(-1, top.indices).log_softmax(-1))
    assert (cut > whole).any() or (cut < LOSSES[loss](with_rest(top.values), log_probs_at(q, top.indices))).any()


def examples(count=5, learn_from=3):
    made = []
    for seed in range(count):
        ids = prompt(6 + seed, seed)[0].tolist()
        made.append(training.example(ids[:learn_from], ids[learn_from:], 99) | {"number": seed})
    return made


class Bar:
    def start(self, *_):
        return self

    def advance(self, *_):
        pass

    def stop(self):
        pass


def trainer(draft, teacher, folder, **recipe):
    arguments = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
    return distillation.DistillTrainer(model=draft, teacher=teacher, recipe=Distill(**recipe), pad=0, args=arguments)


def test_loss_is_the_kl_of_the_whole_distribution(llama, llama_draft, tmp_path):
    batch = training.collate(examples(1), 0)
    ids = batch["input_ids"].clone()
    loss = trainer(llama_draft, llama, tmp_path).compute_loss(llama_draft, batch)
    p, q = (model(ids).logits[:, 2:-1].double().softmax(-1) for model in (llama, llama_draft))
    torch.testing.assert_close(loss.double(), (p * (p / q).log()).sum(-1).mean(), atol=1e-5, rtol=1e-4)


def test_from_the_cache_the_loss_is_the_same_and_the_target_runs_once(llama, llama_draft, tmp_path):
    cache = TopK(tmp_path / "cache", 64)  # the whole vocabulary
    cache.fill(llama, examples(), 2, 0, Bar())
    live = trainer(llama_draft, llama, tmp_path).compute_loss(llama_draft, training.collate(examples(), 0))
    batch = distillation.collate_with(cache, 0, examples())
    torch.testing.assert_close(
        trainer(llama_draft, None, tmp_path).compute_loss(llama_draft, batch), live, atol=2e-3, rtol=0
    )
    wrong = distillation.collate_with(cache, 0, [each | {"number": 0} for each in examples(1)] + examples()[1:2])
    right = distillation.collate_with(cache, 0, examples()[:2])
    torch.testing.assert_close(wrong["top_ids"], right["top_ids"])
    again = TopK(tmp_path / "cache", 64)
    again.fill(None, examples(), 2, 0, Bar())  # there is nothing left to ask a target
    assert again.where == cache.where
    (tmp_path / "cache" / "00000002-2-64.safetensors").write_bytes(b"half")
    with pytest.raises(AttributeError):
        TopK(tmp_path / "cache", 64).fill(None, examples(), 2, 0, Bar())


def test_on_policy_texts_are_the_drafts_own(llama, llama_draft, tmp_path):
    learner = trainer(noisy_copy(llama), llama, tmp_path, on_policy=1.0, sample_new_tokens=4)
    batch = learner.own_texts(learner.model, training.collate(examples(3), 0))
    for before, ids, labels in zip(examples(3), batch["input_ids"], batch["labels"], strict=True):
        assert ids[:3].tolist() == before["input_ids"][:3]
        assert 1 <= (labels != training.IGNORED).sum() <= 4 and (labels[:3] == training.IGNORED).all()
    torch.manual_seed(0)
    seen = []
    learner.model.train()
    learner.model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    learner.compute_loss(learner.model, training.collate(examples(3), 0)).backward()
    assert learner.model.training and not torch.equal(seen[-1], training.collate(examples(3), 0)["input_ids"])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_kept_layers_are_the_targets(kind):
    model = make_model(kind, layers=4)
    draft = keep_layers(model, [0, 3])
    assert draft.config.num_hidden_layers == 2 and model.config.num_hidden_layers == 4
    # What the target says without its two layers in the middle.
    short = make_model(kind, layers=4)
    stack = short.transformer.h if kind == "gpt2" else short.model.layers
    for number in (1, 2):
        stack[number].register_forward_hook(lambda module, args, output: args[0])
    ids = prompt(9)
    torch.testing.assert_close(draft(ids, use_cache=False).logits, short(ids, use_cache=False).logits)
    torch.testing.assert_close(
        draft.generate(ids, max_new_tokens=8, do_sample=False),
        short.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False),
    )
    with torch.no_grad():
        next(draft.parameters()).zero_()
    assert next(model.parameters()).abs().sum() > 0  # a model of its own


def test_layers_that_are_not_there(llama):
    assert spread(make_model(layers=7), 3) == [0, 3, 6] and spread(make_model(layers=7), 1) == [0]
    for layers in ([], [0, 2], [-1], [1, 1]):
        with pytest.raises(ValueError, match="from 0 to 1"):
            keep_layers(llama, layers)
    with pytest.raises(ValueError, match="give 1 to 1"):
        spread(llama, 2)


def test_prune_then_distil(tmp_path, capsys):
    shape = SHAPE.replace("num_hidden_layers: 1", "num_hidden_layers: 3")
    run_recipe(specplug.load(*TRAIN, shape, "recipe.steps=80", "recipe.learning_rate=0.01"), tmp_path / "target")
    target = ["target=custom", f"target.name_or_path={tmp_path / 'target' / 'model'}", "threads=1"]
    assert run_recipe(specplug.load("recipe=prune", *target, "recipe.layers=[0,2]"), tmp_path / "pruned") == 0
    assert last_json(capsys)["layers"] == [0, 2]
    distil = [
        *("recipe=distill", "dataset=tiny_corpus", "dataset.corpus_size=48", *target),
        f"recipe.init={tmp_path / 'pruned' / 'model'}",
        *("recipe.loss=jsd", "recipe.top_k=32", "recipe.freeze_embeddings=true", "recipe.on_policy=0.3"),
        *("recipe.sample_batch_size=16", "recipe.sample_new_tokens=16", "recipe.held_out=8", "recipe.steps=30"),
        *("recipe.save_steps=10", "recipe.learning_rate=0.01", "recipe.warmup_steps=2", "recipe.loss_on_prompt=true"),
    ]
    assert run_recipe(specplug.load(*distil), tmp_path / "draft") == 0
    result = last_json(capsys)
    steps = result["acceptance_by_step"]
    assert list(steps) == ["0", "10", "20", "30"]
    assert steps["30"][1] > steps["0"][1], "the draft did not come nearer to its target"
    assert steps["30"][1] <= result["overlap_at_1"] + 1e-3, "of the top k alone it is a lower bound"
    pruned, draft = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model", dtype=torch.float32)
        for name in ("pruned", "draft")
    )
    torch.testing.assert_close(
        pruned.get_input_embeddings().weight, draft.get_input_embeddings().weight, atol=0, rtol=0
    )
    assert not torch.equal(pruned.model.layers[0].mlp.up_proj.weight, draft.model.layers[0].mlp.up_proj.weight)

    model = load_model(Model(name_or_path=str(tmp_path / "target" / "model")), "target")
    named = Draft(name_or_path=str(tmp_path / "draft" / "model"))
    drafter = build_drafter(named, model)
    assert drafter.model.get_input_embeddings().weight is model.get_input_embeddings().weight, "held twice"
    other = noisy_copy(model, 1.0)
    with pytest.raises(ConfigError, match=r"was made for .*any_target=true"):
        build_drafter(named, other)
    named.any_target = True
    build_drafter(named, other)
    assert not torch.equal(drafter.model.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_a_fingerprint_survives_loading_in_other_ways(tmp_path):
    model = make_model("llama", layers=3)
    model.save_pretrained(tmp_path)
    ways = [Model(name_or_path=str(tmp_path), dtype=dtype, device="cpu") for dtype in Dtype]
    ways.append(Model(name_or_path=str(tmp_path), device="cpu", quantization=Quantization(QuantizationMethod.nf4)))
    assert {fingerprint(load_model(way, "target")) for way in ways} == {fingerprint(model)}
    assert fingerprint(noisy_copy(model, 0.3)) != fingerprint(model) != fingerprint(make_model("llama", layers=2))


def test_a_quantized_copy_shares_the_embeddings(tmp_path):
    make_model("llama", layers=2, tie_word_embeddings=False).save_pretrained(tmp_path)
    target = load_model(Model(name_or_path=str(tmp_path), device="cpu"), "target")
    copy = Draft(name_or_path=str(tmp_path), device="cpu", quantization=Quantization(QuantizationMethod.nf4))
    draft = build_drafter(copy, target).model
    for of in ("get_input_embeddings", "get_output_embeddings"):
        assert getattr(draft, of)().weight is getattr(target, of)().weight
    assert draft.model.layers[0].mlp.up_proj.weight.dtype is torch.uint8


@pytest.mark.parametrize(
    "card", ["", "no front matter", "---\n- a\n---\n", "---\nspecplug: yes\n---\n", "---\n{\n---\n"]
)
def test_cards_that_say_nothing(tmp_path, card):
    model = make_model("llama", layers=2)
    noisy_copy(model).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text(card)
    build_drafter(Draft(name_or_path=str(tmp_path), device="cpu"), model)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["recipe=distill", "recipe.on_policy=2"], "on_policy"),
        (["recipe=distill", "recipe.top_k=0"], "top_k"),
        (["recipe=distill", "recipe.loss=huber"], "loss"),
        (["recipe=prune"], "give one of the two"),
        (["recipe=prune", "recipe.layers=[0]", "recipe.num_layers=2"], "give one of the two"),
    ],
)
def test_bad_choices_are_one_line(overrides, match):
    with pytest.raises(ConfigError, match=match) as caught:
        specplug.load(*overrides)
    assert "\n" not in str(caught.value)


def test_prune_says_what_cannot_be_pruned(tmp_path):
    with pytest.raises(ConfigError, match="quantization=nf4"):
        run_recipe(specplug.load("recipe=prune", "recipe.num_layers=2", "target/quantization=nf4"), tmp_path)
    with pytest.raises(ConfigError, match="has 10 layers"):
        run_recipe(specplug.load("recipe=prune", "recipe.num_layers=12"), tmp_path)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_what_was_not_measured_is_no_figure(llama, llama_draft):
    assert distillation.held_out_acceptance(llama, llama_draft, [], 0) == {"agreement_at_0": None, "overlap_at_1": None}
