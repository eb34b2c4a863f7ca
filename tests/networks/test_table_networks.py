"""Embeddings by slow loops over their definition, an ensemble by its members built one by one."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evalign import EASTClassifier, metrics
from evalign.networks.embedding import CategoryEmbedding, Fields, NumberEmbedding, Piecewise, TableEmbedding
from evalign.networks.mlp import NETWORKS, Ensemble, fields_of, mlp, table_network
from evalign.objective import Objective, cross_entropy
from evalign.steps import StepChoice
from evalign.tables.encode import TableEncoder
from evalign.training.batches import Rows, argmax_score
from evalign.training.in_memory import Phase, batch_loss, train
from evalign.training.recipes import find_recipe
from evalign.training.stacked import Trial, train_trials

FIELDS = Fields(6, numbers=(1, 3), edges=((-1.0, 0.0, 2.0), (0.0, 0.5, 1.0)), categories=((4, 6),))
F1 = Objective("f1", "multiclass", StepChoice("annealed"), average="macro")
FAST = {"hidden": (16,), "epochs": 12, "learning_rate": 1e-2, "folds": 1, "random_state": 0}


def randomise(module: nn.Module) -> nn.Module:
    """Randomise weights, since zeros would hide a mistake."""
    for i, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    return module


# -- embeddings -------------------------------------------------------------------------------------------------------


def test_bins_by_a_loop_over_values_and_bins():
    edges = [(-1.0, 0.0, 2.0, 2.5), (0.0, 1.0)]
    x = torch.tensor([[-9.0, -1.0, -0.25, 0.0, 1.0, 2.5, 9.0], [-1.0, 0.0, 0.1, 0.5, 0.9, 1.0, 7.0]])
    found = Piecewise(edges, bins=3)(x[..., None])
    for j, own in enumerate(edges):
        for i, value in enumerate(x[j].tolist()):
            passed = [min(1, max(0, (value - own[b]) / (own[b + 1] - own[b]))) for b in range(len(own) - 1)]
            assert found[j, i].tolist() == pytest.approx(passed + [0] * (3 - len(passed)))


def test_many_edges_are_thinned_evenly_and_few_are_all_kept():
    many, few = np.linspace(0, 1, 1000), np.array([3.0, 4.0, 4.0, 9.0])
    piecewise = Piecewise([tuple(many), tuple(few)], bins=9)
    assert piecewise.low[0, 0].tolist() == pytest.approx(many[::111][:9].tolist(), abs=1e-6)
    assert piecewise.low[1, 0, :2].tolist() == [3.0, 4.0]
    assert piecewise.slope[1, 0].tolist() == pytest.approx([1, 1 / 5, *[0] * 7])
    with pytest.raises(ValueError, match="two or more edges, got 1"):
        Piecewise([(1.0, 1.0)], bins=4)


def test_numbers_by_a_linear_layer_for_each_column():
    curve = Piecewise(FIELDS.edges, bins=4)
    embedding = randomise(NumberEmbedding(curve, columns=2, width=5))
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    expected = []
    for j in range(2):
        encoded = curve(x.t()[..., None])[j]
        inputs = torch.cat([encoded, x[:, j : j + 1]], 1)
        weight = torch.cat([embedding.weight[j], embedding.slope[j]]).t()
        expected.append(F.linear(inputs, weight, embedding.bias[j, 0]).relu())
    torch.testing.assert_close(embedding(x), torch.cat(expected, 1))


def test_categories_by_torchs_embedding_and_unseen_ones_by_the_mean():
    embedding = CategoryEmbedding([3, 2], width=4)
    codes = torch.tensor([[0, 1], [2, 0], [1, 1]])
    x = torch.cat([F.one_hot(codes[:, 0], 3), F.one_hot(codes[:, 1], 2)], 1).float()
    tables = embedding.vectors.split([3, 2])
    expected = torch.cat([F.embedding(codes[:, j], tables[j]) for j in range(2)], 1)
    torch.testing.assert_close(embedding(x), expected)
    x[0, :3], x[1, 3:] = 0, 0
    unseen = embedding(x)
    torch.testing.assert_close(unseen[0, :4], tables[0].mean(0))
    torch.testing.assert_close(unseen[1, 4:], tables[1].mean(0))
    torch.testing.assert_close(unseen[2], expected[2])


def test_gradients_are_finite_differences():
    embedding = randomise(TableEmbedding(FIELDS, width=2, bins=3)).double()
    x = torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    parameters = dict(embedding.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(embedding, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters.values()))


def test_columns_that_are_no_categories_stay_as_they_are():
    x = torch.randn(4, 6)
    embedding = TableEmbedding(FIELDS, width=3)
    out = embedding(x)
    assert torch.equal(out[:, :4], x[:, :4])
    assert out.shape[1] == embedding.width == 4 + 3 * 2 + 3
    assert TableEmbedding(Fields(3, categories=((0, 3),)), width=2)(torch.eye(3)).shape == (3, 2)
    assert torch.equal(TableEmbedding(Fields(2))(x[:, :2]), x[:, :2])


def test_fields_are_where_the_encoder_puts_them():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "few": rng.integers(0, 4, 200).astype(float),
            "same": np.ones(200),
            "job": rng.choice(["cook", "smith", None], 200),
            "flag": rng.random(200) < 0.5,
            "pay": np.where(rng.random(200) < 0.1, np.nan, rng.lognormal(0, 2, 200)),
        }
    )
    for numeric, values in (("both", 2), ("quantile", 1), ("standard", 1)):
        encoder = TableEncoder(numeric=numeric).fit(frame)
        fields, names = fields_of(encoder), encoder.feature_names_out
        assert fields.features == len(names)
        assert [names[place] for place in fields.numbers] == (["few=<rank>", "pay=<rank>"] if values == 2 else
                                                             ["few", "pay"])  # fmt: skip
        [(start, end)] = fields.categories
        assert names[start:end] == ["job=cook", "job=smith", "job=<missing>"]
        x = encoder.transform(frame)
        for place, edges in zip(fields.numbers, fields.edges, strict=True):
            if numeric == "standard":
                assert edges == ()
            else:  # ranks of training values reach from the first edge to the last
                ends = pytest.approx((edges[0], edges[-1]), rel=2.0**-11)  # which float16 rounds
                assert (x[:, place].min(), x[:, place].max()) == ends
    assert len(fields_of(TableEncoder(numeric="both").fit(frame)).edges[0]) < 8  # as few as the values, and the gaps


# -- ensembles --------------------------------------------------------------------------------------------------------


def members_of(network: Ensemble, features: int, classes: int, hidden: tuple[int, ...]) -> list[nn.Sequential]:
    """The networks that an ensemble represents, built separately."""
    built = []
    for m in range(network.members):
        one = mlp(features, classes, hidden, dropout=0.0)
        linear = [module for module in one if isinstance(module, nn.Linear)]
        for mine, layer in zip(linear, [*network.layers, network.last], strict=True):
            mine.weight.data, mine.bias.data = layer.weight[m].detach().t().clone(), layer.bias[m, 0].detach().clone()
        built.append(one)
    return built


def test_an_ensemble_is_its_members():
    network = randomise(Ensemble(5, 3, (8, 4), dropout=0.0, members=4))
    members = members_of(network, 5, 3, (8, 4))
    x = torch.randn(9, 5)
    torch.testing.assert_close(network(x), torch.stack([one(x) for one in members]), rtol=1e-4, atol=1e-4)
    p = sum(one(x).softmax(1) for one in members) / 4
    torch.testing.assert_close(network.eval()(x).softmax(1), p)
    torch.testing.assert_close(network(x).exp(), p)


@pytest.mark.parametrize("metric", [False, True])
def test_a_member_learns_from_its_own_loss(metric):
    """The gradient of a batch is that of each member's loss by itself, over their number."""
    network = randomise(Ensemble(5, 3, (8,), dropout=0.0, members=3)).double()
    members = members_of(network, 5, 3, (8,))
    x, y = torch.randn(40, 5, dtype=torch.float64), torch.arange(40) % 3
    weight = torch.rand(40, dtype=torch.float64)
    stage = find_recipe("anchored").stages[int(metric)]
    loss = batch_loss(network, Rows(x, y, weight), Phase(stage, replace(F1, anchor=3.0), 0.2))
    loss.backward()
    alone = []
    for m, one in enumerate(members):
        z = one.double()(x)
        own = cross_entropy(z, y, weight, "multiclass")
        if metric:
            own = 3.0 * own + F1.metric_term(F1.confusion(z, y, weight, 0.2))
        own.backward()
        alone.append(own.item())
        torch.testing.assert_close(network.layers[0].weight.grad[m], one[0].weight.grad.t() / 3)
        torch.testing.assert_close(network.last.bias.grad[m, 0], one[-1].bias.grad / 3)
    assert loss.item() == pytest.approx(np.mean(alone))


def test_members_drop_out_apart():
    network = Ensemble(4, 2, (64,), dropout=0.5, members=3)
    for parameter in network.parameters():
        nn.init.ones_(parameter)
    z = network(torch.ones(2, 4))
    assert len({round(value, 3) for value in z[..., 0].flatten().tolist()}) > 3
    assert torch.equal(network.eval()(torch.ones(2, 4)), network(torch.ones(2, 4)))


@pytest.mark.parametrize("name", NETWORKS)
def test_stacked_trials_equal_the_plain_loop(name):
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
    x[:, 4:] = F.one_hot((x[:, 2] > 0).long(), 2)
    rows = Rows.of(x, (x[:, 1] ** 2 + x[:, 2] > 1).long())
    recipe, score = find_recipe("anchored").limited(4), argmax_score(metrics.resolve("f1", average="macro"))

    def make() -> nn.Module:
        return table_network(name, FIELDS, 2, (8,), 0.0, ensemble=2, width=4, bins=4)

    parts = torch.arange(120), torch.arange(120, 160)
    stacked = train_trials(make, rows, [Trial(*parts, recipe, seed=s) for s in (3, 5)], F1, score, batch_size=40)
    for seed, found in zip((3, 5), stacked, strict=True):
        torch.manual_seed(seed)
        network = make()
        history = train(network, *(rows[p] for p in parts), recipe, F1, score, batch_size=40, seed=seed)
        assert [e.loss for e in history] == pytest.approx([e.loss for e in found.history], abs=1e-4)
        for key, value in network.state_dict().items():
            torch.testing.assert_close(found.state[key], value, rtol=1e-3, atol=1e-4)


# -- the classifier ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    n = 300
    table = pd.DataFrame(
        {
            "age": rng.normal(40, 10, n),
            "pay": np.where(rng.random(n) < 0.1, np.nan, rng.lognormal(3, 1, n)),
            "job": rng.choice(["cook", "smith", None], n),
            "town": pd.Categorical(rng.choice(["A", "B"], n)),
            "car": rng.random(n) < 0.5,
        }
    )
    y = np.where((table.job == "smith") & (table.age > 35), "rich", np.where(table.pay > 30, "fair", "poor"))
    return table, y


@pytest.mark.parametrize(
    "options",
    [
        {"network": "embedding"},
        {"network": "embedding", "numeric": "quantile", "ensemble": 3},
        {"ensemble": 3},
    ],
)
def test_tables_of_all_kinds_are_learned_and_saved(frame, options, tmp_path):
    table, y = frame
    model = EASTClassifier(**{**FAST, "epochs": 40}, **options).fit(table[:200], y[:200])
    assert model.score(table[200:], y[200:]) > 0.6
    p = model.predict_proba(table)
    np.testing.assert_allclose(p.sum(1), 1)
    again = EASTClassifier.load(model.save(tmp_path / "model"))
    assert np.array_equal(again.predict_proba(table), p)
    assert again.get_params() == model.get_params()
    odd = table[:4].assign(job="astronaut", town=pd.Categorical([None] * 4, ["A", "B"]), age=[1e9, -1e9, np.nan, 0])
    assert np.isfinite(model.predict_proba(odd)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"network": "embedding", "ensemble": 2}, {"ensemble": 2}],
)
def test_onnx_agrees(frame, options, tmp_path):
    table, y = frame
    model = EASTClassifier(**FAST, **options).fit(table, y)
    session = onnxruntime.InferenceSession(model.export_onnx(tmp_path / "m.onnx"))
    x = model.encoder_.transform(table[:50].assign(job=["astronaut", "cook"] * 25))  # as many rows as come
    probabilities, labels = session.run(None, {"x": x})
    p = model.predict_proba(table[:50].assign(job=["astronaut", "cook"] * 25))
    np.testing.assert_allclose(probabilities, p, atol=1e-5)
    assert probabilities.shape == (50, 3)
    assert (model.classes_[labels] == model.predict(table[:50].assign(job=["astronaut", "cook"] * 25))).mean() > 0.95


def test_an_unseen_category_is_the_mean_of_the_known_ones(frame):
    table, y = frame
    model = EASTClassifier(**FAST, network="embedding").fit(table, y)
    vectors = model.network_[0].of_categories.vectors.detach()
    unseen = torch.from_numpy(model.encoder_.transform(table[:1].assign(job="astronaut")))
    out = model.network_[0](unseen).detach()[0]
    torch.testing.assert_close(out[-32:-16], vectors[:3].mean(0))  # cook, smith, missing


def test_a_seed_decides_and_members_differ(frame):
    table, y = frame
    fits = [EASTClassifier(**FAST, network="embedding", ensemble=2).fit(table, y) for _ in range(2)]
    assert np.array_equal(*(model.predict_proba(table) for model in fits))
    weight = fits[0].network_[1].last.weight
    assert not torch.allclose(weight[0], weight[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"network": "embeding"}, "did you mean 'embedding'"),
        ({"ensemble": 0}, r"ensemble must lie in \[1"),
        ({"ensemble": 2.5}, "ensemble must be a whole number"),
        ({"network": "embedding", "numeric": "standard"}, "numeric 'standard' does not learn"),
    ],
)
def test_wrong_options_are_told(options, words, frame):
    with pytest.raises(ValueError, match=words):
        EASTClassifier(**FAST, **options).fit(*frame)
