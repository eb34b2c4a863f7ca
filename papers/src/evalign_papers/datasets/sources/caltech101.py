"""Caltech-101: photographs of objects; used in place of Caltech-256."""

from dataclasses import replace

import numpy as np

from evalign.checks import check_number
from evalign_papers.datasets.dataset import Card, Dataset, File, Protocol, Version
from evalign_papers.datasets.folders import Store
from evalign_papers.datasets.image_files import Pictures, read_folder, read_npz, skipped_note

SIDE = 48
BACKGROUND = "BACKGROUND_Google"
BACKGROUND_ROWS = 467
COUNTS = """
Faces 435, Faces_easy 435, Leopards 200, Motorbikes 798, accordion 55, airplanes 800, anchor 42, ant 42, barrel 47,
bass 54, beaver 46, binocular 33, bonsai 128, brain 98, brontosaurus 43, buddha 85, butterfly 91, camera 50, cannon
43, car_side 123, ceiling_fan 47, cellphone 59, chair 62, chandelier 107, cougar_body 47, cougar_face 69, crab 73,
crayfish 70, crocodile 50, crocodile_head 51, cup 57, dalmatian 67, dollar_bill 52, dolphin 65, dragonfly 68,
electric_guitar 75, elephant 64, emu 53, euphonium 64, ewer 85, ferry 67, flamingo 67, flamingo_head 45, garfield
34, gerenuk 34, gramophone 51, grand_piano 99, hawksbill 100, headphone 42, hedgehog 54, helicopter 88, ibis 80,
inline_skate 31, joshua_tree 64, kangaroo 86, ketch 114, lamp 61, laptop 81, llama 78, lobster 41, lotus 66,
mandolin 43, mayfly 40, menorah 87, metronome 32, minaret 76, nautilus 55, octopus 35, okapi 39, pagoda 47, panda
38, pigeon 45, pizza 53, platypus 34, pyramid 57, revolver 82, rhino 59, rooster 49, saxophone 40, schooner 63,
scissors 39, scorpion 84, sea_horse 57, snoopy 35, soccer_ball 64, stapler 45, starfish 86, stegosaurus 59,
stop_sign 64, strawberry 35, sunflower 85, tick 49, trilobite 86, umbrella 75, watch 239, water_lilly 37, wheelchair
59, wild_cat 34, windsor_chair 56, wrench 39, yin_yang 60
"""

CARD = Card(
    name="caltech101",
    title="Caltech-101",
    kind="images",
    source="https://data.caltech.edu/records/mzrjq-6wc02",
    citation="Fei-Fei, Fergus, Perona, Learning generative visual models from few training examples, CVPR-W 2004",
    licence="CC BY 4.0",
    rows=8677,
    num_classes=101,
    counts={name: int(count) for name, count in (entry.split() for entry in COUNTS.split(","))},
    versions=(
        Version(
            "npz",
            (File("caltech101_48.npz", 35932091, "54791c9f961f60cfb4b36c27e14c0dabf82fba2334ae859f8373396770f538f2"),),
        ),
        Version("folder", (File("101_ObjectCategories", directory=True),), ("", "caltech101", "caltech-101")),
    ),
    notes=(
        "Not in the papers.",
        "The background class (467 images found by chance) is left out unless background=True.",
        "Faces and Faces_easy are crops of the same photographs, so the two classes are not independent.",
        "There is no official split. The folder has no checksum; its images are counted.",
    ),
)


def load(store: Store, protocol: Protocol, *, size: int = SIDE, background: bool = False) -> Dataset:
    """`size` in pixels; the npz file has 48, anything else needs the folder of images."""
    check_number("size", size, low=8, high=512)
    found = store.get(CARD if size == SIDE else replace(CARD, versions=CARD.versions[1:]))
    if found.version.form == "npz":
        X, y, more = read_npz(found.paths[0], ("classes",))
        pictures = Pictures(X, y, tuple(map(str, more["classes"])))
    else:
        pictures = read_folder(found.paths[0], size, order=lambda name: (name == BACKGROUND, name))
    X, y, classes = pictures.X, pictures.y, pictures.classes
    if not background and BACKGROUND in classes:
        kept = y != classes.index(BACKGROUND)
        X, y, classes = X[kept], y[kept], classes[:-1]
    card = CARD
    if background:
        counts = {**CARD.counts, BACKGROUND: BACKGROUND_ROWS}
        card = replace(CARD, rows=sum(counts.values()), num_classes=len(counts), counts=counts)
    return Dataset(card, X, np.asarray(y), classes, protocol, notes=tuple(skipped_note(pictures)))
