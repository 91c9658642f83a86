"""Discovery finds cases in every layout, and errors describe the contents if no layout matches."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane.errors import ConfigError, LayoutError, NotFoundError
from voxlane.volume.dataset_discovery import discover
from voxlane.volume.dataset_layouts import LAYOUTS, REGIONS, SourceCase, detect_layout, parse_brats

MSD = {
    "name": "Spleen",
    "modality": {"0": "CT"},
    "labels": {"0": "background", "1": "spleen"},
    "training": [{"image": f"./imagesTr/s_{i}.nii.gz", "label": f"./labelsTr/s_{i}.nii.gz"} for i in (2, 1)],
}
NNUNET = {
    "channel_names": {"0": "T2", "1": "ADC"},
    "labels": {"background": 0, "PZ": 1, "TZ": 2},
    "file_ending": ".nii.gz",
}
BRAIN = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}


def write_files(folder: Path, *names: str, **documents: Any) -> str:
    """Write tiny files with these names, and JSON documents. Return the path of the folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    for name, document in documents.items():
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(document))
    return str(folder)


def msd_files(*numbers: int) -> list[str]:
    return [f"{kind}Tr/s_{i}.nii.gz" for kind in ("images", "labels") for i in numbers]


def test_kits19(tmp_path: Path) -> None:
    src = write_files(
        tmp_path, *(f"case_0000{i}/{n}.nii.gz" for i in (0, 1) for n in ("imaging", "segmentation")), "LICENSE"
    )
    write_files(tmp_path, "case_00002/imaging.nii.gz", "case_00003/segmentation.nii.gz", "case_00000/._imaging.nii.gz")
    actual = discover(src)
    assert (actual.layout, actual.root) == ("kits19", f"file://{tmp_path}/")
    assert actual.description.channels == ("CT",)
    assert dict(actual.description.labels) == {"background": 0, "kidney": 1, "tumour": 2}
    assert actual.description.targets == ("kidney", "tumour")
    base = f"file://{tmp_path}/case_0000"
    assert actual.cases[0] == SourceCase(
        "case_00000", "case_00000", (f"{base}0/imaging.nii.gz",), f"{base}0/segmentation.nii.gz"
    )
    assert [case.label is None for case in actual.cases] == [False, False, True, False]
    assert actual.cases[3].images == (f"{base}3/imaging.nii.gz",)  # listed, so that the check reports it as missing
    assert len(actual.etags) == 6
    assert all(tag.endswith(":1") for tag in actual.etags.values())


def test_kits19_regions_by_name_and_by_mapping(tmp_path: Path) -> None:
    src = write_files(tmp_path, "data/case_00000/imaging.nii.gz", "data/case_00000/segmentation.nii.gz")
    description = discover(src, overrides={"regions": "kits19", "name": "mine"}).description
    assert description.name == "mine"
    assert description.targets == ("kidney+tumour", "tumour")
    assert description.target_values == ((1, 2), (2,))
    assert discover(src, overrides={"regions": {"all": [1, 2]}}).description.targets == ("all",)
    with pytest.raises(ConfigError, match=r"unknown name 'kits'.*Use one of kits19"):
        discover(src, overrides={"regions": "kits"})
    with pytest.raises(ConfigError, match=r"regions\.all: expected values of labels above 0, got \[5\]"):
        discover(src, overrides={"regions": {"all": [5]}})
    with pytest.raises(ConfigError, match=r"chanels: no such field.*channels"):
        discover(src, overrides={"chanels": ["CT"]})


def test_msd(tmp_path: Path) -> None:
    src = write_files(tmp_path, *msd_files(1, 2), "imagesTr/._s_1.nii.gz", dataset=MSD)
    actual = discover(src)
    assert actual.layout == "msd"
    assert [case.id for case in actual.cases] == ["s_1", "s_2"]
    assert actual.cases[0].label == f"file://{tmp_path}/labelsTr/s_1.nii.gz"
    assert actual.description.name == "Spleen"
    assert dict(actual.description.labels) == {"background": 0, "spleen": 1}
    assert len(actual.etags) == 4
    assert discover(f"{src}/dataset.json") == actual
    assert pickle.loads(pickle.dumps(actual)) == actual


def test_msd_missing_files_become_cases_to_check(tmp_path: Path) -> None:
    actual = discover(write_files(tmp_path, "imagesTr/s_1.nii.gz", "labelsTr/s_2.nii.gz", dataset=MSD))
    assert [case.label is None for case in actual.cases] == [True, False]
    assert actual.cases[1].images == (f"file://{tmp_path}/imagesTr/s_2.nii.gz",)


def test_msd_brain_tumours_have_their_own_regions(tmp_path: Path) -> None:
    modality = {"3": "T2w", "0": "FLAIR", "1": "T1w", "2": "t1gd"}
    src = write_files(
        tmp_path, *msd_files(1, 2), dataset=MSD | {"name": "BRATS", "labels": BRAIN, "modality": modality}
    )
    description = discover(src).description
    assert description.channels == ("FLAIR", "T1w", "t1gd", "T2w")
    assert {name: list(values) for name, values in description.regions.items()} == REGIONS["msd-brats"]
    assert description.mask_values == (1, 2, 3)
    assert discover(src, overrides={"regions": None}).description.regions == {}


def test_first_nnunet_has_one_file_per_channel(tmp_path: Path) -> None:
    files = [f"imagesTr/s_{i}_000{c}.nii.gz" for i in (1, 2) for c in (0, 1)]
    src = write_files(tmp_path, *files, "labelsTr/s_1.nii.gz", dataset=MSD | {"modality": {"0": "T2", "1": "ADC"}})
    case = discover(src).cases[0]
    assert case.id == "s_1"
    assert case.images == tuple(f"file://{tmp_path}/imagesTr/s_1_000{c}.nii.gz" for c in (0, 1))


def test_nnunet(tmp_path: Path) -> None:
    files = [f"imagesTr/p_1_{i}_000{c}.nii.gz" for i in (1, 2) for c in (0, 1)]
    src = write_files(tmp_path / "Dataset005", *files[:3], "labelsTr/p_1_1.nii.gz", "labelsTr/q.nii.gz", dataset=NNUNET)
    actual = discover(src)
    assert (actual.layout, actual.description.name) == ("nnunet", "Dataset005")
    assert [(case.id, case.label is None) for case in actual.cases] == [("p_1_1", False), ("p_1_2", True), ("q", False)]
    assert [image.rpartition("/")[2] for image in actual.cases[1].images] == ["p_1_2_0000.nii.gz", "p_1_2_0001.nii.gz"]
    assert actual.description.channels == ("T2", "ADC")


def test_nnunet_regions_and_explicit_files(tmp_path: Path) -> None:
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}
    listed = {"a": {"images": ["raw/a_t2.nii.gz", "raw/a_adc.nii.gz"], "label": "raw/a_seg.nii.gz"}}
    document = NNUNET | {"labels": labels, "regions_class_order": [1, 2, 3], "dataset": listed}
    actual = discover(
        write_files(tmp_path, "raw/a_t2.nii.gz", "raw/a_adc.nii.gz", "raw/a_seg.nii.gz", dataset=document)
    )
    assert actual.description.target_values == ((1, 2, 3), (2, 3), (3,))
    assert actual.description.mask_values == (1, 2, 3)
    assert sorted(actual.description.labels.values()) == [0, 1, 2, 3]
    assert actual.cases[0].label == f"file://{tmp_path}/raw/a_seg.nii.gz"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file_ending": ".png"}, "file_ending: '.png' is not supported"),
        ({"labels": {"background": 0, "a": 1, "ignore": 2}}, "labels.ignore"),
        ({"labels": {"background": 0, "a": "one"}}, "labels.a: expected an integer, got 'one'"),
        ({"labels": {}}, "labels: no labels are listed"),
        ({"channel_names": {}}, "channel_names: no channels"),
        ({"dataset": {"a": {"label": "x.nii.gz"}}}, r"dataset\.a: images are missing"),
        ({"file_ending": ".mha"}, r"no imagesTr/\*_0000.mha"),
    ],
)
def test_errors_name_the_field_of_dataset_json(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    src = write_files(tmp_path, "imagesTr/a_0000.nii.gz", dataset=NNUNET | changes)
    with pytest.raises(LayoutError, match=message) as caught:
        discover(src)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (MSD | {"training": []}, "training: no cases are listed"),
        (MSD | {"training": [{"label": "a"}]}, r"training\[0\]: image is missing"),
        ({"labels": {}}, "neither training .* nor channel_names .* only: labels"),
        (MSD | {"training": MSD["training"] + MSD["training"][:1]}, "1 ids are used by several cases: s_2"),
    ],
)
def test_invalid_msd_lists(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        discover(write_files(tmp_path, *msd_files(1, 2), dataset=document))


def test_invalid_json(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text('{"training": [\n oops')
    with pytest.raises(LayoutError, match=r"dataset\.json: invalid JSON: .* line 2"):
        discover(str(tmp_path))
    (tmp_path / "dataset.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayoutError, match="UTF-8"):
        discover(str(tmp_path))


def test_brats_with_both_label_numberings(tmp_path: Path) -> None:
    old = [f"HGG/Brats18_{i}/Brats18_{i}_{m}.nii.gz" for i in (1, 2) for m in ("t1", "t1ce", "t2", "flair", "seg")]
    actual = discover(write_files(tmp_path / "old", *old[:-1]))
    assert actual.layout == "brats"
    assert actual.description.channels == ("T1", "T1ce", "T2", "FLAIR")
    assert actual.description.target_values == ((1, 2, 4), (1, 4), (4,))
    assert actual.description.mask_values == (2, 1, 4)
    assert [case.id for case in actual.cases] == ["Brats18_1", "Brats18_2"]
    assert actual.cases[1].label is None
    assert [uri.rpartition("_")[2] for uri in actual.cases[0].images] == [
        f"{m}.nii.gz" for m in ("t1", "t1ce", "t2", "flair")
    ]
    new = [f"{p}/{p}-{m}.nii.gz" for p in ("BraTS-GLI-00001-000", "BraTS-GLI-00001-001") for m in ("t1c", "t2f", "seg")]
    actual = discover(write_files(tmp_path / "new", *new))
    assert actual.description.target_values == ((1, 2, 3), (1, 3), (3,))
    assert {case.patient for case in actual.cases} == {"BraTS-GLI-00001"}
    assert actual.cases[0].images[0].endswith("BraTS-GLI-00001-000-t1n.nii.gz")  # missing, but listed
    assert actual.description.regions
    with pytest.raises(LayoutError, match="labels are numbered differently"):
        discover(write_files(tmp_path, "x"))


def test_brats_patients_in_one_folder_are_separate_cases() -> None:
    names = [f"P{i}_{m}.nii.gz" for i in (1, 2) for m in ("t1", "t1ce", "t2", "flair", "seg")]
    cases = parse_brats(names, None, "gs://b/").cases
    assert [(case.id, case.images[0], case.label) for case in cases] == [
        ("P1", "P1_t1.nii.gz", "P1_seg.nii.gz"),
        ("P2", "P2_t1.nii.gz", "P2_seg.nii.gz"),
    ]


def test_label_overrides_remove_regions_of_the_layout(tmp_path: Path) -> None:
    src = write_files(tmp_path, *(f"a/a_{m}.nii.gz" for m in ("t1", "t1ce", "t2", "flair", "seg")))
    labels = {"background": 0, "tumour": 1}
    description = discover(src, overrides={"labels": labels}).description
    assert description.targets == ("tumour",)


CASES = [
    {"image": "scans/a.nii.gz", "label": "labels/a.nii.gz", "patient": "p1"},
    {"image": ["scans/b.nii.gz"], "label": "labels/b.nii.gz", "id": "second"},
    {"image": "scans/c.nii.gz"},
]
DESCRIPTION = {"channels": ["CT"], "labels": {"background": 0, "liver": 1}}


def test_json_lists(tmp_path: Path) -> None:
    src = write_files(tmp_path, "scans/a.nii.gz", "labels/a.nii.gz", pairs={"description": DESCRIPTION, "cases": CASES})
    actual = discover(f"{src}/pairs.json")
    assert (actual.layout, actual.description.name) == ("list", "pairs")
    assert [(case.id, case.patient) for case in actual.cases] == [("a", "p1"), ("c", "c"), ("second", "second")]
    assert actual.cases[1].label is None
    assert set(actual.etags) == {f"file://{tmp_path}/scans/a.nii.gz", f"file://{tmp_path}/labels/a.nii.gz"}
    write_files(tmp_path, bare=CASES)
    assert discover(f"{src}/bare.json", overrides=DESCRIPTION).cases == actual.cases
    with pytest.raises(LayoutError, match="does not define channels and labels"):
        discover(f"{src}/bare.json")


def test_csv_lists_in_a_bucket_with_absolute_paths(gcs: Bucket, put: Callable[..., None]) -> None:
    lines = ["image_0, image_1, label, id", "x/a_0.nii.gz, gs://bkt/other/a_1.nii.gz, ../y/a.nii.gz, A"]
    put(gcs, {"lists/all.csv": "\n".join(lines).encode(), "lists/x/a_0.nii.gz": b"1", "y/a.nii.gz": b"22"})
    actual = discover("gs://bkt/lists/all.csv", gcs.config, overrides=DESCRIPTION | {"channels": ["T1", "T2"]})
    assert actual.cases == (
        SourceCase("A", "A", ("gs://bkt/lists/x/a_0.nii.gz", "gs://bkt/other/a_1.nii.gz"), "gs://bkt/y/a.nii.gz"),
    )
    assert actual.etags["gs://bkt/y/a.nii.gz"].endswith(":2")
    assert len(actual.etags) == 2


def test_equal_file_names_get_ids_from_their_folders(tmp_path: Path) -> None:
    rows = [{"image": f"case{i}/imaging.nii.gz"} for i in (1, 2)]
    actual = discover(write_files(tmp_path, pairs=rows) + "/pairs.json", overrides=DESCRIPTION)
    assert [case.id for case in actual.cases] == ["case1_imaging", "case2_imaging"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no list of cases"),
        ({"cases": {}}, "no list of cases"),
        ([{"scan": "a", "label": "b"}], "case 1 has no image, only scan, label"),
        ([{"image": "a", "label": ["b", "c"]}], "case 1: label is not a path"),
        (["a.nii.gz"], "case 1: expected an object"),
        ([{"image": "a", "id": "x"}, {"image": "b", "id": "x"}], "1 ids are used by several cases: x"),
        ([{"image": "a", "id": "x/y"}], "'x/y' is not a valid case id"),
        ({"description": 3, "cases": [{"image": "a"}]}, "description: expected an object"),
    ],
)
def test_invalid_lists(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        discover(write_files(tmp_path, pairs=rows) + "/pairs.json", overrides=DESCRIPTION)


def test_errors_describe_unknown_layouts(tmp_path: Path, gcs: Bucket) -> None:
    src = write_files(tmp_path / "some", *(f"scan_{i}.nii.gz" for i in range(6)))
    with pytest.raises(LayoutError, match=r"expected dataset\.json.*It contains scan_0\.nii\.gz.* and 2 more"):
        discover(src)
    with pytest.raises(LayoutError, match=r"no case_XXXXX/imaging\.nii\.gz.*It contains scan_0"):
        discover(src, layout="kits19")
    with pytest.raises(LayoutError, match=r"the msd layout needs a dataset\.json"):
        discover(src, layout="msd")
    with pytest.raises(LayoutError, match="no folders with files named"):
        discover(src, layout="brats")
    with pytest.raises(LayoutError, match=r"\.json or \.csv file"):
        discover(src, layout="list")
    with pytest.raises(ConfigError, match=r"unknown layout 'kits'.*kits19, msd, nnunet, brats, npy, list"):
        discover(src, layout="kits")
    write_files(tmp_path / "above" / "Task09", *msd_files(1), dataset=MSD)
    with pytest.raises(LayoutError, match=r"Use Task09, which has a dataset\.json"):
        discover(str(tmp_path / "above"))
    with pytest.raises(NotFoundError):
        discover(str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError):
        discover(str(tmp_path / "none.json"))
    with pytest.raises(LayoutError, match="the folder is empty"):
        discover("gs://bkt/empty", gcs.config)


def test_prefix_excludes_neighbours_and_changes_have_new_etags(
    gcs: Bucket, put: Callable[..., None], emulator: Any
) -> None:
    objects = {f"kits/case_0000{i}/{n}.nii.gz": b"x" for i in range(3) for n in ("imaging", "segmentation")}
    put(gcs, objects | {"kits2/case_00009/imaging.nii.gz": b"x"})
    actual = discover("gs://bkt/kits", gcs.config)
    assert [case.id for case in actual.cases] == ["case_00000", "case_00001", "case_00002"]
    before = dict(actual.etags)
    assert discover("gs://bkt/kits/", gcs.config).etags == before
    gcs.store.put("kits/case_00001/imaging.nii.gz", b"y")  # a new version of the same size
    after = discover("gs://bkt/kits", gcs.config).etags
    assert {uri for uri in after if after[uri] != before[uri]} == {"gs://bkt/kits/case_00001/imaging.nii.gz"}


PIECES = ["case_00001", "data", "imaging", "segmentation", "a_t1", "a_t1ce", "a_seg", "a-t1c", "a-t2f", ".nii.gz", "/"]


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), max_size=8))
def test_any_names_give_cases_or_a_layout_error(names: list[str]) -> None:
    try:
        cases = LAYOUTS[detect_layout(names, None, "gs://b/")](names, None, "gs://b/").cases
    except LayoutError:
        return
    assert cases
    assert {case.label for case in cases} - {None} <= set(names)
    assert any(image in names for case in cases for image in case.images) or any(case.label for case in cases)


OUTSIDE = [
    "/etc/hostname",
    "../other/a.nii.gz",
    "imagesTr/../../a.nii.gz",
    "~/a.nii.gz",
    "file:///etc/hostname",
    "gs://other/a",
    "imagesTr/a\0b.nii.gz",
]
"""Paths that no dataset.json may name."""


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("part", ["image", "label"])
def test_msd_entries_stay_in_the_dataset(
    gcs: Bucket, put: Callable[..., None], tmp_path: Path, path: str, part: str
) -> None:
    document = MSD | {"training": [MSD["training"][0], {**MSD["training"][1], part: path}]}
    put(gcs, {"msd/dataset.json": json.dumps(document).encode(), **{f"msd/{name}": b"x" for name in msd_files(1, 2)}})
    local = write_files(tmp_path, *msd_files(1, 2), dataset=document)
    for src, config in (("gs://bkt/msd", gcs.config), (local, None), (f"{local}/dataset.json", None)):
        with pytest.raises(LayoutError, match=rf"training\[1\].{part}: '.*' is outside the dataset"):
            discover(src, config)


@pytest.mark.parametrize("path", OUTSIDE)
def test_nnunet_entries_stay_in_the_dataset(tmp_path: Path, path: str) -> None:
    entries = {"A": {"images": ["imagesTr/A_0000.nii.gz", path], "label": "labelsTr/A.nii.gz"}}
    src = write_files(tmp_path, "imagesTr/A_0000.nii.gz", "labelsTr/A.nii.gz", dataset=NNUNET | {"dataset": entries})
    with pytest.raises(LayoutError, match=r"dataset.json: dataset.A.images: .* is outside the dataset"):
        discover(src)


def test_an_absolute_path_inside_the_dataset_and_links_are_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/imagesTr").symlink_to(tmp_path / "real")
    training = [{"image": f"{tmp_path}/data/imagesTr/s_1.nii.gz", "label": "labelsTr/s_1.nii.gz"}]
    src = write_files(tmp_path / "data", *msd_files(1), dataset=MSD | {"training": training})
    (case,) = discover(src).cases
    assert case.images == (f"file://{tmp_path}/data/imagesTr/s_1.nii.gz",)
    assert case.label == f"file://{tmp_path}/data/labelsTr/s_1.nii.gz"


@pytest.mark.parametrize("path", ["/etc/hostname", "~/a.nii.gz", "file:///etc/hostname", "gs://other/a", "../../../a"])
def test_a_list_in_a_bucket_names_only_objects_of_the_bucket(
    gcs: Bucket, put: Callable[..., None], tmp_path: Path, path: str
) -> None:
    cases = [{"image": "a.nii.gz", "label": path}]
    put(gcs, {"lists/all.json": json.dumps(cases).encode(), "lists/a.nii.gz": b"1"})
    with pytest.raises(LayoutError, match=r"gs://bkt/lists/all.json: the list names '.*', which is not in its bucket"):
        discover("gs://bkt/lists/all.json", gcs.config, overrides=DESCRIPTION)


def test_a_list_on_this_machine_may_name_any_file(tmp_path: Path) -> None:
    src = write_files(tmp_path / "lists", all=[{"image": f"{tmp_path}/a.nii.gz", "label": "../b.nii.gz"}])
    (case,) = discover(f"{src}/all.json", overrides=DESCRIPTION).cases
    assert (case.images, case.label) == ((f"file://{tmp_path}/a.nii.gz",), f"file://{tmp_path}/b.nii.gz")
