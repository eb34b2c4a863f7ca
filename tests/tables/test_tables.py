"""TableEncoder against scikit-learn's transformers, and every error message for tables."""

import datetime as dt
import json
import time
import tracemalloc
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from sklearn.exceptions import NotFittedError
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.preprocessing import OneHotEncoder, QuantileTransformer, StandardScaler

from evalign.tables.columns import ColumnTypeError
from evalign.tables.encode import TableEncoder, TreeTable

RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(3, 5, size=(200, 4))
TWO = pd.Series(["a", "b"])


def encode(values, predict=None, **options):
    """One column, fitted on `values`, applied to `predict`."""
    fit, new = (
        pd.DataFrame({"c": v}) if not isinstance(v, pd.DataFrame) else v
        for v in (values, values if predict is None else predict)
    )
    return TableEncoder(**options).fit(fit).transform(new)


def round_trip(encoder):
    return TableEncoder.from_json(json.loads(json.dumps(encoder.to_json(), allow_nan=False)))


# --- numbers


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "int64", "uint8", "Int64", "Float64", "Float32", object]
)
def test_numbers_are_standardised_as_scikit_learn_does(dtype):
    frame = pd.DataFrame(np.rint(np.abs(NUMBERS) * 3), columns=list("abcd")).astype(dtype)
    expected = StandardScaler().fit_transform(frame.astype(np.float64))
    out = TableEncoder().fit_transform(frame)
    assert out.dtype == np.float32
    assert out.flags.c_contiguous
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_a_new_table_is_standardised_with_the_training_moments():
    scaler = StandardScaler().fit(NUMBERS)
    new = RNG.normal(size=(50, 4)) * 40
    np.testing.assert_allclose(TableEncoder().fit(NUMBERS).transform(new), scaler.transform(new), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [np.asfortranarray, lambda x: x[::2, ::-1], lambda x: x.tolist(), pd.DataFrame])
def test_layout_and_container_are_immaterial_and_the_input_is_left_alone(change):
    table = change(NUMBERS)
    plain = np.ascontiguousarray(np.array(table, dtype=float))
    if isinstance(table, np.ndarray):
        table.flags.writeable = False
    np.testing.assert_array_equal(TableEncoder().fit_transform(table), TableEncoder().fit_transform(plain))
    np.testing.assert_array_equal(np.array(table, dtype=float), plain)


def test_missing_numbers_become_the_mean_and_are_marked():
    X = NUMBERS.copy()
    X[RNG.random(X.shape) < 0.2] = np.nan
    X[:, 2] = NUMBERS[:, 2]  # one column without
    imputed = StandardScaler().fit(X).transform(SimpleImputer().fit_transform(X))
    marks = MissingIndicator(features="missing-only").fit_transform(X)
    encoder = TableEncoder().fit(X)
    names = ["x0", "x0=<missing>", "x1", "x1=<missing>", "x2", "x3", "x3=<missing>"]
    assert encoder.feature_names_out == names
    out = encoder.transform(X)
    np.testing.assert_allclose(out[:, [0, 2, 4, 5]], imputed, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[:, [1, 3, 6]], marks)


def test_missing_at_prediction_only_is_the_mean_without_a_mark():
    np.testing.assert_allclose(encode([1.0, 2.0, 6.0], [np.nan, 3.0]), [[0], [0]], atol=1e-7)


@pytest.mark.parametrize(
    "column",
    [
        pd.array([1, None, 3], dtype="Int64"),
        pd.array([1.0, None, 3.0], dtype="Float64"),
        pd.Series([1, None, 3], dtype=object),
        pd.Series([1, pd.NA, 3.0], dtype=object),
        pd.Series([Decimal(1), None, Decimal(3)], dtype=object),
        pd.Series([1, None, 3], dtype=pd.ArrowDtype(pa.int64())),
        pd.Series([Decimal(1), None, Decimal(3)], dtype=pd.ArrowDtype(pa.decimal128(5, 2))),
        pd.arrays.SparseArray([1.0, np.nan, 3.0]),
    ],
)
def test_every_sort_of_missing_number_is_one(column):
    np.testing.assert_allclose(encode(column), [[-1, 0], [0, 1], [1, 0]], atol=1e-7)


def test_a_constant_column_is_zeros_and_named():
    frame = pd.DataFrame({"c": [0.1] * 3, "n": [1.0, None, 1.0], "t": ["x"] * 3, "b": [True] * 3, "v": [1, 2, 3]})
    encoder = TableEncoder().fit(frame)
    assert encoder.constant_columns_ == ["c", "t", "b"]  # of "n" it matters where it is missing
    assert not encoder.transform(frame)[:, 0].any()
    assert not encoder.transform(frame.assign(c=1e9))[:, 0].any()
    assert TableEncoder().fit(np.ones((5, 2))).constant_columns_ == [0, 1]


@pytest.mark.parametrize("numeric", ["standard", "quantile"])
@pytest.mark.parametrize(
    "values",
    [
        [1e300, 2e300, -5e299],
        [1.7e308, -1.7e308, 0.0],
        [1e299] * 99 + [1.5e299],
        [1e-310, 2e-310, 5e-324],
        [1e-200, 3e-200, 0],
    ],
)
def test_huge_and_tiny_numbers_stay_finite(values, numeric):
    out = encode(values, numeric=numeric)
    assert np.isfinite(out).all()
    order = np.argsort(values)
    assert (np.diff(out[order, 0]) >= 0).all()
    assert out.min() < 0 < out.max()
    assert np.isfinite(encode(values, [1.7e308, -1.7e308], numeric=numeric)).all()


@pytest.mark.parametrize("numeric", ["standard", "quantile"])
def test_numbers_beyond_1e300_are_taken_as_1e300(numeric):
    np.testing.assert_array_equal(encode([1e308, 1.5e308], numeric=numeric), [[0], [0]])
    np.testing.assert_array_equal(encode([1.7e308, 1.0], numeric=numeric), encode([1e300, 1.0], numeric=numeric))


def test_tiny_and_huge_columns_are_standardised_like_any_other():
    x = NUMBERS[:, 0]
    for unit in (2.0**-1000, 2.0**980):
        np.testing.assert_array_equal(encode(x * unit), encode(x))


def test_outliers_at_prediction_are_cut():
    np.testing.assert_array_equal(encode([0.0, 1.0], [1e300, -1e300, 1e30]), [[1e4], [-1e4], [1e4]])


@pytest.mark.parametrize("n", [7, 300, 5000])
def test_quantile_is_scikit_learns(n):
    X = np.random.default_rng(n).lognormal(sigma=3, size=(n, 3))
    X[:, 1] = np.rint(np.log(X[:, 1]))  # ties
    X[::5, 2] = np.nan
    transformer = QuantileTransformer(n_quantiles=min(1000, n), output_distribution="normal", subsample=None).fit(X)
    encoder = TableEncoder(numeric="quantile").fit(X)
    new = np.random.default_rng(1).lognormal(sigma=4, size=(1000, 3))
    if n == 5000:  # scikit-learn spreads its levels over all rows, we over those that have a value
        expected = np.nan_to_num(transformer.transform(X))
        np.testing.assert_allclose(encoder.transform(X)[:, :3], expected, atol=1e-5, rtol=2.0**-11)
    expected = transformer.transform(new)[:, :2]
    np.testing.assert_allclose(encoder.transform(new)[:, :2], expected, atol=1e-5, rtol=2.0**-11)  # as float16 rounds
    assert encoder.feature_names_out == ["x0", "x1", "x2", "x2=<missing>"]


# --- true/false and categories


@pytest.mark.parametrize("dtype", [bool, object, "boolean", pd.ArrowDtype(pa.bool_())])
def test_bool_is_0_and_1(dtype):
    column = pd.Series([True, False, True, True], dtype=dtype)
    np.testing.assert_array_equal(encode(column), [[1], [0], [1], [1]])
    np.testing.assert_array_equal(encode(column, [1, 0]), [[1], [0]])
    np.testing.assert_array_equal(encode(column, pd.Series([None, True], dtype="boolean")), [[0.75], [1]])


def test_missing_bool_is_the_share_of_true_and_marked():
    np.testing.assert_array_equal(encode(pd.array([True, None, False], dtype="boolean")), [[1, 0], [0.5, 1], [0, 0]])


@pytest.mark.parametrize("dtype", [object, "str", "string", "category", pd.ArrowDtype(pa.string())])
def test_categories_are_scikit_learns_one_hot(dtype):
    letters = np.array(list("abcdefg"))
    old, new = (pd.Series(RNG.choice(part, 100), dtype=dtype) for part in (letters[:5], letters[2:]))
    expected = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(old.astype(object).to_frame())
    np.testing.assert_array_equal(encode(old, new), expected.transform(new.astype(object).to_frame()))


def test_numpy_text_and_objects_are_one_hot_too():
    X = np.array([["a", "x"], ["b", "y"], ["a", "x"]])
    expected = OneHotEncoder(sparse_output=False).fit_transform(X)
    for table in (X, X.astype(object), X.tolist()):
        np.testing.assert_array_equal(TableEncoder().fit_transform(table), expected)
    mixed = TableEncoder().fit(np.array([[1, "a", None], [2, "b", True]], dtype=object))
    assert mixed.feature_names_out == ["x0", "x1=a", "x1=b", "x2", "x2=<missing>"]


def test_a_missing_category_has_its_column_only_if_seen():
    seen = TableEncoder().fit(pd.DataFrame({"c": ["a", None, "b"]}))
    assert seen.feature_names_out == ["c=a", "c=b", "c=<missing>"]
    np.testing.assert_array_equal(seen.transform(pd.DataFrame({"c": [None, "z"]})), [[0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(encode(TWO, pd.Series([None, "a"])), [[0, 0], [1, 0]])


def test_categories_beyond_the_most_frequent_are_others_as_in_scikit_learn():
    counts = {"a": 9, "b": 2, "c": 7, "d": 5, "e": 3, "f": 4}
    old = pd.DataFrame({"c": [name for name, count in counts.items() for _ in range(count)]})
    new = pd.DataFrame({"c": list("abcdefz")})
    expected = OneHotEncoder(max_categories=4, handle_unknown="infrequent_if_exist", sparse_output=False).fit(old)
    encoder = TableEncoder(max_categories=3).fit(old)
    assert encoder.feature_names_out == ["c=a", "c=c", "c=d", "c=<other>"]
    np.testing.assert_array_equal(encoder.transform(new), expected.transform(new))
    assert not encoder.id_like_columns_


def test_the_cap_keeps_the_most_frequent_of_many():
    rng = np.random.default_rng(3)
    counts = rng.permutation(np.repeat(np.arange(2, 42), 3))  # each count thrice: ties at the cap
    names = np.array([f"v{k:03}" for k in range(120)])
    encoder = TableEncoder(max_categories=50).fit(rng.permutation(np.repeat(names, counts))[:, None])
    kept = sorted(sorted(range(120), key=lambda k: (-counts[k], k))[:50])
    assert encoder.feature_names_out == [f"x0={names[k]}" for k in kept] + ["x0=<other>"]


@pytest.mark.parametrize(("rows", "columns", "kept"), [(1_000, 1, 100), (160_000, 1, 64), (60_000, 3, 64)])
def test_categories_told_apart_by_default_depend_on_the_size_of_the_table(rows, columns, kept):
    names = pd.Series([f"v{i % 100}" for i in range(rows)])
    encoder = TableEncoder().fit(pd.DataFrame({f"c{j}": names for j in range(columns)}))
    assert len(encoder.feature_names_out) == columns * (kept + (kept < 100))  # one column for the others
    assert TreeTable().fit(names.to_frame("c")).transform(names.to_frame("c")).max() == 99


def test_of_many_categories_those_seen_once_are_others():
    names = [f"v{i:03}" for i in range(80)] * 2 + ["once"]
    found = TableEncoder().fit(pd.DataFrame({"c": names})).feature_names_out
    assert found == [f"c=v{i:03}" for i in range(80)] + ["c=<other>"]


@pytest.mark.parametrize(("distinct", "id_like"), [(100, False), (101, True), (64, False)])
def test_an_id_is_what_over_half_the_rows_differ_in(distinct, id_like):
    X = np.array([[f"u{i % distinct}"] for i in range(200)], dtype=object)
    assert TableEncoder().fit(X).id_like_columns_ == [0] * id_like


def test_ties_at_the_cap_do_not_depend_on_the_order_of_rows():
    rows = list("abcdabcd")
    names = {
        tuple(TableEncoder(max_categories=2).fit([[v] for v in part]).feature_names_out) for part in (rows, rows[::-1])
    }
    assert names == {("x0=a", "x0=b", "x0=<other>")}


def test_an_id_is_named_and_does_not_enter_the_model():
    frame = pd.DataFrame(
        {"id": [f"u{i}" for i in range(100)], "v": range(100), "city": [f"t{i % 30}" for i in range(100)]}
    )
    encoder = TableEncoder().fit(frame)
    assert encoder.id_like_columns_ == ["id"]
    assert encoder.constant_columns_ == []
    assert encoder.feature_names_out[:3] == ["id=<other>", "v", "city=t0"]
    assert "u7" not in json.dumps(encoder.to_json())
    assert encoder.text_columns_ == ["id", "city"]


def test_categories_that_are_numbers_match_by_value():
    old = pd.Series([3, 1, 3, None], dtype="Int64").astype("category")
    encoder = round_trip(TableEncoder().fit(pd.DataFrame({"c": old})))
    assert encoder.feature_names_out == ["c=1", "c=3", "c=<missing>"]
    assert encoder.text_columns_ == []
    for new in ([1.0, 3.0, np.nan, 7.0], pd.Series([1, 3, None, 7], dtype="Int64").astype("category")):
        expected = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
        np.testing.assert_array_equal(encoder.transform(pd.DataFrame({"c": new})), expected)


def test_unused_categories_get_no_column():
    assert encode(pd.Categorical(["a", "b"], categories=["z", "b", "a"])).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("old", [[1.0, 2.0], ["a", "b"], [True, False], pd.Categorical([1, 2])])
@pytest.mark.parametrize(
    "new",
    [
        pd.Series([None, None], dtype=object),
        pd.Series([np.nan] * 2),
        pd.Series([None] * 2, dtype="str"),
        pd.Categorical([None, None]),
        pd.array([None, None], dtype="boolean"),
    ],
)
def test_a_column_without_values_at_prediction_is_missing_throughout(old, new):
    out = encode(old, new)
    assert (out == out[0]).all()
    assert np.isin(out, [0, 0.5]).all()


# --- names and order


def test_names_follow_scikit_learn():
    assert TableEncoder().fit(pd.DataFrame({"a": [1, 2]})).feature_names_in_.tolist() == ["a"]
    for table in (NUMBERS, pd.DataFrame(NUMBERS)):  # the frame's names are integers
        encoder = TableEncoder().fit(table)
        assert not hasattr(encoder, "feature_names_in_")
        assert encoder.n_features_in_ == 4
    again = TableEncoder().fit(pd.DataFrame({"a": [1, 2]})).fit(NUMBERS)
    assert not hasattr(again, "feature_names_in_")


def test_columns_are_found_by_name_and_arrays_go_by_position():
    frame = pd.DataFrame(NUMBERS, columns=list("abcd"))
    encoder = TableEncoder().fit(frame)
    out = encoder.transform(frame)
    np.testing.assert_array_equal(encoder.transform(frame[list("dcba")]), out)
    np.testing.assert_array_equal(encoder.transform(NUMBERS), out)
    np.testing.assert_array_equal(TableEncoder().fit(NUMBERS).transform(frame), out)


def test_select_orders_the_columns_and_tells_the_others():
    frame = pd.DataFrame(NUMBERS, columns=list("abcd"))
    encoder = TableEncoder().fit(frame)
    table, extra = encoder.select(frame.assign(note=1, id=2)[["id", "d", "c", "b", "a", "note"]])
    assert extra == ["id", "note"]
    pd.testing.assert_frame_equal(table, frame)
    assert encoder.select(frame)[0] is frame
    assert encoder.select(NUMBERS)[0] is NUMBERS
    with pytest.raises(ValueError, match=r"but lacks 'a'; did you mean 'A'\?"):
        encoder.select(frame.rename(columns={"a": "A"}))


def test_arrow_tables_and_what_converts_to_pandas_are_taken():
    frame = pd.DataFrame({"a": [1.0, 2.0, 4.0], "t": ["x", "y", "x"]})
    encoder = TableEncoder().fit(pa.Table.from_pandas(frame))
    assert encoder.feature_names_in_.tolist() == ["a", "t"]
    np.testing.assert_array_equal(encoder.transform(frame), TableEncoder().fit_transform(frame))


def test_a_fit_that_fails_leaves_the_encoder_as_it_was():
    encoder = TableEncoder().fit(NUMBERS)
    before = encoder.transform(NUMBERS)
    with pytest.raises(ValueError, match="infinity"):
        encoder.fit(np.array([[1.0], [np.inf]]))
    np.testing.assert_array_equal(encoder.transform(NUMBERS), before)


def test_no_rows_at_prediction_give_no_rows():
    assert TableEncoder().fit(NUMBERS).transform(NUMBERS[:0]).shape == (0, 4)


# --- what is refused

DATES = "column 'c' holds dates; turn it into numbers with"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pd.date_range("2020", periods=2), DATES),
        (pd.date_range("2020", periods=2, tz="UTC"), DATES),
        (pd.Categorical(pd.date_range("2020", periods=2)), DATES),
        ([dt.date(2020, 1, 1), None], DATES),
        (pd.Series([dt.datetime(2020, 1, 1)] * 2, dtype=object), DATES),
        (pd.Series([1, 2], dtype=pd.ArrowDtype(pa.timestamp("s"))), DATES),
        (pd.Series([1, 2], dtype=pd.ArrowDtype(pa.date32())), DATES),
        (pd.to_timedelta([1, 2], unit="s"), "'c' holds time spans; turn it into numbers first"),
        ([dt.time(1), dt.time(2)], "'c' holds times of day; turn"),
        (pd.period_range("2020", periods=2, freq="D"), "'c' holds periods; turn"),
        (pd.interval_range(0, 2), "'c' holds intervals; turn"),
        ([1j, 2.0], "'c' holds complex numbers; give the real"),
        ([b"x", b"y"], "'c' holds bytes; decode it"),
        ([[1], [2]], "'c' holds list values, but every argument must be a string or a number"),
        ([{"a": 1}, None], "'c' holds dict values"),
        ([1, "a"], "'c' mixes int and str values, .*; make it all numbers or all text"),
        (pd.Series([True, 2], dtype=object), "'c' mixes bool and int values"),
        (pd.Categorical([1, "a"]), "'c' mixes int and str values"),
        ([1.0, np.inf, -np.inf], r"'c' holds infinity in 2 rows; replace it with a finite number"),
        (pd.Categorical([1.0, np.inf]), r"'c' has a category that is infinite; give it a name"),
        (pd.Series([10**400, 1], dtype=object), "'c' holds a number larger than 1.8e308"),
        (np.array([1, np.finfo(np.longdouble).max]), "'c' holds infinity in 1 row;"),
    ],
    ids=str,
)
def test_columns_that_are_refused(column, message):
    with pytest.raises(ValueError, match=message) as error:
        TableEncoder().fit(pd.DataFrame({"v": range(len(column)), "c": column}))
    assert "\n" not in str(error.value)


def test_records_are_refused():
    with pytest.raises(ValueError, match=r"^column 0 holds records; give each field a separate column$"):
        TableEncoder().fit(np.zeros((2, 1), dtype=[("a", int)]))


def test_text_with_a_missing_date_is_text():
    assert encode(pd.Series(["a", pd.NaT, "b"], dtype=object)).tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_scikit_learn_gets_the_type_error_its_checks_look_for():
    X = NUMBERS.astype(object)
    X[0, 0] = {"foo": "bar"}
    with pytest.raises(TypeError, match=r"argument must be .* string.* number"):
        TableEncoder().fit(X)


TEXT = "str" if int(pd.__version__.split(".")[0]) >= 3 else "string"  # before pandas 3 "str" means object


@pytest.mark.parametrize(
    "empty", [[None, None], [np.nan] * 2, pd.Categorical([None, None]), pd.array([None] * 2, dtype=TEXT)]
)
def test_columns_without_any_value_are_named(empty):
    with pytest.raises(ValueError, match=r"^column 'x' has no value at all; drop it$"):
        TableEncoder().fit(pd.DataFrame({"v": [1, 2], "x": empty}))
    with pytest.raises(ValueError, match=r"^columns 'x', 'y' have no value at all; drop them$"):
        TableEncoder().fit(pd.DataFrame({"v": [1, 2], "x": empty, "y": empty}))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ([1.0, 2.0], ["3.5", "x"], "'c' held numbers in training, got '3.5'; pass the same kind"),
        ([True, False], ["yes", None], "'c' held true/false values in training, got 'yes'"),
        ([True, False], [1.0, 2.0], "'c' held true/false values in training, got 2; pass 0 or 1"),
        (["a", "b"], [None, 7.0], r"'c' held text in training, got 7\.0"),
        (["a", "b"], [True, False], "'c' held text in training, got True"),
        (pd.Categorical([1, 2]), ["1", "2"], "'c' held categories that are numbers in training, got '1'"),
        ([1.0, 2.0], [1.0, np.inf], "'c' holds infinity in 1 row;"),
        ([1.0, 2.0], pd.date_range("2020", periods=2), DATES),
    ],
)
def test_another_kind_at_prediction_is_told(old, new, message):
    with pytest.raises(ValueError, match=message):
        encode(old, new)


def test_columns_that_lack_or_are_too_many_are_named():
    encoder = TableEncoder().fit(pd.DataFrame(NUMBERS, columns=["age", "pay", "c", "d"]))
    frame = pd.DataFrame(NUMBERS, columns=["Age", "pay", "c", "d"])
    with pytest.raises(
        ValueError, match=r"^X must have the columns of training, but lacks 'age'; did you mean 'Age'\?$"
    ):
        encoder.transform(frame)
    with pytest.raises(ValueError, match=r"but lacks 'age', 'd'$"):
        encoder.transform(frame[["pay", "c"]])
    with pytest.raises(ValueError, match="only the columns of training, but also has 'Age'; drop them or use select"):
        encoder.transform(frame.assign(age=1))
    with pytest.raises(ValueError, match="X has 3 features, but TableEncoder is expecting 4 features as input"):
        encoder.transform(NUMBERS[:, :3])
    wide = TableEncoder().fit(pd.DataFrame(np.eye(12), columns=[f"w{j}" for j in range(12)]))
    with pytest.raises(ValueError, match="'w9' and 2 more"):
        wide.transform(frame)


def test_tables_that_are_refused():
    twice = pd.DataFrame([[1, 2, 3]], columns=["a", "b", "a"])
    with pytest.raises(ValueError, match="column names must be unique, got 'a' more than once; rename or drop one"):
        TableEncoder().fit(twice)
    with pytest.raises(ValueError, match="column names must be unique"):
        TableEncoder().fit(twice.iloc[:, :2]).transform(twice)
    with pytest.raises(TypeError, match=r"string names, but your input has \['int', 'str'\] as feature name"):
        TableEncoder().fit(pd.DataFrame({"a": [1], 0: [2]}))
    with pytest.raises(ValueError, match=r"a sparse X is converted to dense, and shape .*TruncatedSVD"):
        TableEncoder().fit(scipy.sparse.coo_array((10**6, 10**6)))
    with pytest.raises(ValueError, match=r"^Expected 2D array, got 1D array instead.*Reshape your data"):
        TableEncoder().fit([1, 2])
    with pytest.raises(ValueError, match=r"^Found array with 0 sample\(s\) \(shape=\(0, 2\)\) while a minimum of 1"):
        TableEncoder().fit(np.empty((0, 2)))
    with pytest.raises(ValueError, match=r"^Found array with 0 feature\(s\) \(shape=\(2, 0\)\) while a minimum of 1"):
        TableEncoder().fit(pd.DataFrame(index=[0, 1]))
    for act in ("transform", "select"):
        with pytest.raises(NotFittedError, match=r"^This TableEncoder instance is not fitted yet; call fit first$"):
            getattr(TableEncoder(), act)(NUMBERS)
    with pytest.raises(NotFittedError):
        TableEncoder().to_json()
    with pytest.raises(NotFittedError):
        _ = TableEncoder().feature_names_out
    with pytest.raises(
        ValueError, match="numeric must be one of standard, quantile, both, got 'quantiles'; did you mean 'quantile'"
    ):
        TableEncoder(numeric="quantiles")
    with pytest.raises(ValueError, match=r"^max_categories must lie in"):
        TableEncoder(max_categories=0)


# --- JSON

FINITE = st.floats(allow_nan=False, allow_infinity=False)
COLUMNS = st.one_of(
    st.lists(st.one_of(st.none(), FINITE), min_size=2, max_size=30).map(lambda v: pd.Series(v, dtype="float64")),
    st.lists(st.one_of(st.none(), st.integers(-(2**62), 2**62)), min_size=2, max_size=30).map(
        lambda v: pd.Series(v, dtype="Int64")
    ),
    st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=2, max_size=30).map(
        lambda v: pd.Series(v, dtype=object)
    ),
    st.lists(st.one_of(st.none(), st.booleans()), min_size=2, max_size=30).map(lambda v: pd.Series(v, dtype="boolean")),
    st.lists(st.one_of(st.none(), st.sampled_from("uvw")), min_size=2, max_size=30).map(
        lambda v: pd.Series(v, dtype="category")
    ),
)


@settings(max_examples=150, deadline=None)
@given(old=COLUMNS, split=st.integers(1, 29), numeric=st.sampled_from(["standard", "quantile"]), cap=st.integers(1, 5))
def test_json_gives_the_same_transform_bit_for_bit(old, split, numeric, cap):
    frame = pd.DataFrame({"c": old})
    head = frame.iloc[:split]
    if head["c"].isna().all():
        return
    encoder = TableEncoder(numeric=numeric, max_categories=cap).fit(head)
    copy = round_trip(encoder)
    out = encoder.transform(frame)
    assert np.isfinite(out).all()
    assert out.shape[1] == len(encoder.feature_names_out)
    assert copy.transform(frame).tobytes() == out.tobytes()
    assert copy.to_json() == encoder.to_json()
    assert copy.constant_columns_ == encoder.constant_columns_
    for i in range(min(3, len(frame))):  # a row's encoding does not depend on the rows beside it
        np.testing.assert_array_equal(encoder.transform(frame.iloc[[i]])[0], out[i])


@settings(max_examples=100, deadline=None)
@given(arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=8)), st.sampled_from(["standard", "quantile"]))
def test_any_array_is_encoded_or_refused(X, numeric):
    encoder = TableEncoder(numeric=numeric)
    if np.isinf(X).any() or np.isnan(X).all(0).any():
        with pytest.raises(ValueError, match=r"infinity|no value at all"):
            encoder.fit(X)
    else:
        assert np.isfinite(encoder.fit_transform(X)).all()


def test_json_keeps_names_options_and_lists():
    frame = pd.DataFrame(
        {
            "id": [f"u{i}" for i in range(90)],
            "v": RNG.normal(size=90),
            "k": 1,
            "t": pd.Series(["ä", "\ud800"] * 45, dtype=object),
        }
    )
    encoder = TableEncoder(numeric="quantile", max_categories=20).fit(frame)
    copy = round_trip(encoder)
    for name in (
        "numeric",
        "max_categories",
        "id_like_columns_",
        "constant_columns_",
        "text_columns_",
        "n_features_in_",
    ):
        assert getattr(copy, name) == getattr(encoder, name)
    assert copy.feature_names_in_.tolist() == encoder.feature_names_in_.tolist()
    assert copy.feature_names_out == encoder.feature_names_out
    np.testing.assert_array_equal(copy.transform(frame), encoder.transform(frame))


def damaged(**change):
    data = TableEncoder(numeric="quantile").fit(pd.DataFrame({"n": [1, 2, 3], "t": ["a", "b", "c"]})).to_json()
    for key, value in change.items():
        place, name = (data["columns"][int(key[1])], key[3:]) if key[0] == "c" and key[1].isdigit() else (data, key)
        if value is ...:
            del place[name]
        else:
            place[name] = value
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "must be a JSON object of format 'evalign.tables'"),
        ({"version": 2}, "version 1 is expected, got 2; load it with the version that saved it"),
        ({"numeric": ...}, "damaged .*numeric"),
        ({"numeric": 3}, "damaged .numeric must be one of"),
        ({"columns": 3}, "damaged"),
        ({"columns": []}, "damaged .0 columns"),
        ({"names": ["a"]}, "damaged .2 columns, other names"),
        ({"names": ["a", "a"]}, "damaged .2 columns, other names"),
        ({"c0_kind": "magic"}, "damaged .*must be number, bool or category, got 'magic'"),
        ({"c0_scale": -1.0}, "damaged .*finite numbers, and scale at least 0"),
        ({"c0_shift": float("nan")}, "damaged .*finite numbers"),
        ({"c0_shift": 10**400}, "damaged"),
        ({"c0_shift": "1"}, "damaged .*fields shift, scale"),
        ({"c0_fill": ...}, "damaged .*fields shift, scale"),
        ({"c0_quantiles": [2.0, 1.0]}, "damaged .the quantiles of a column .*increasing numbers"),
        ({"c0_quantiles": ["a", "b"]}, "damaged .*finite numbers"),
        ({"c1_values": ["a", "a"]}, "damaged .the categories of a column must be distinct and all text or all numbers"),
        ({"c1_values": ["a", [1]]}, "damaged .the categories of a column must be distinct and all text or all numbers"),
        ({"c1_values": ["a", 1]}, "damaged .the categories of a column must be distinct and all text or all numbers"),
        ({"c1_other": 1}, "damaged .*fields values, text"),
        ({"c1_code": "exit()"}, "damaged .*fields values, text"),
    ],
)
def test_damaged_json_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TableEncoder.from_json(damaged(**change))
    if "damaged" in message:
        with pytest.raises(ValueError, match=r"^the table encoder is damaged \(.*\); save it again$"):
            TableEncoder.from_json(damaged(**change))


def test_json_that_is_no_encoder_is_refused_and_whole_numbers_pass():
    for data in (None, [], "x", {}):
        with pytest.raises(ValueError, match="must be a JSON object of format"):
            TableEncoder.from_json(data)
    assert TableEncoder.from_json(damaged(c0_shift=0)).feature_names_out == ["n", "t=a", "t=b", "t=c"]


def test_a_column_type_error_is_both():
    assert issubclass(ColumnTypeError, ValueError)
    assert issubclass(ColumnTypeError, TypeError)


# --- memory and time


@pytest.mark.parametrize("make", [np.asarray, lambda x: pd.DataFrame(x, columns=[f"c{j}" for j in range(50)])])
def test_beside_the_matrix_only_a_few_columns_are_held(make):
    table = make(RNG.normal(size=(200_000, 50)).astype(np.float32))
    column = 200_000 * 8
    encoder = TableEncoder()
    tracemalloc.start()
    try:
        encoder.fit(table)
        fitting = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        out = encoder.transform(table)
        transforming = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert fitting <= 4 * column
    assert transforming <= out.nbytes + 4 * column


def test_large_tables_are_quick():
    n = 48_842  # as Adult: six columns of numbers, eight of text
    mixed = pd.DataFrame({f"n{j}": RNG.integers(0, 90, n) for j in range(6)})
    mixed = mixed.assign(**{f"t{j}": RNG.choice([f"category {k}" for k in range(14)], n) for j in range(8)})
    for table in (mixed, RNG.normal(size=(300_000, 30)).astype(np.float32)):
        start = time.process_time()  # not the clock on the wall, which other processes stretch
        TableEncoder().fit_transform(table)
        assert time.process_time() - start < 1


def test_both_is_standard_and_quantile_side_by_side():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.lognormal(size=200), "b": rng.normal(size=200), "c": np.ones(200)})
    frame.loc[::10, "b"] = np.nan
    standard, ranked, both = (TableEncoder(numeric=kind).fit(frame) for kind in ("standard", "quantile", "both"))
    assert both.feature_names_out == ["a", "a=<rank>", "b", "b=<rank>", "b=<missing>", "c"]
    made = both.transform(frame)
    np.testing.assert_array_equal(made[:, [0, 2, 4, 5]], standard.transform(frame))
    np.testing.assert_array_equal(made[:, [1, 3, 4, 5]], ranked.transform(frame))
    again = TableEncoder.from_json(json.loads(json.dumps(both.to_json())))
    np.testing.assert_array_equal(again.transform(frame), made)


@pytest.mark.parametrize(
    "make", [np.asarray, lambda x: pd.DataFrame(x, columns=list("abcd")).assign(t=["u", "v", None, "w"] * 50)]
)
def test_rows_are_as_if_taken_out_first(make):
    table = make(NUMBERS)
    rows = np.array([7, 3, 3, 199, 0, 42, 42, 42])
    taken = table.iloc[rows] if isinstance(table, pd.DataFrame) else table[rows]
    encoder = TableEncoder().fit(table, rows=rows)
    assert encoder.to_json() == TableEncoder().fit(taken).to_json()
    np.testing.assert_array_equal(encoder.transform(table, rows=rows), encoder.transform(taken))
