"""The simulator's section of docs/performance.md."""

from __future__ import annotations

from pathlib import PurePath

from markdown_tables import table
from performance_claims import command_of
from performance_results import Document, Results, missing, provenance, sentence

CHECK = "simulator"


def scale(results: Results) -> str:
    """What is simulated, and how far it is off where it can be compared."""
    text = "## The scale simulator\n\n"
    document = results.get("scale")
    if document is None:
        text += missing(command_of("scale"))
    else:
        text += "Simulated, not measured, by a discrete-event model ([simulator.md](simulator.md)).\n\n"
        text += results.picture("scale", "The scale simulator")
        text += provenance("scale", command_of("scale", document), document) + "\n" + _public(document)
        text += _rows(document)
    check = results.get(CHECK)
    text += "\n### Against measured runs\n\n"
    if check is None:
        return text + missing(command_of(CHECK))
    text += results.picture(CHECK, "Simulated against measured")
    return text + provenance(CHECK, command_of(CHECK, check), check) + "\n" + _check(check)


def _public(document: Document) -> str:
    """The public table beside the simulated one."""
    public = document["public"]
    if not public:
        return "The settings were not those of the public table.\n\n"
    fitted = public["fitted"]
    rows = [
        [
            f"{row['nodes']:,}",
            " / ".join(f"{gbps:,.0f}" for gbps in row["gbps"]),
            f"{row['simulated_gbps']:,.0f}",
            " / ".join(f"{error:+.0%}" for error in row["errors"]),
            " / ".join(f"{rate:,.0f}" for rate in row["requests_per_s"]),
            f"{row['simulated_requests_per_s']:,.0f}",
            f"{row['simulated_step_s']:.1f}",
        ]
        for row in public["rows"]
    ]
    header = ("nodes", "public: Gbps, epochs 1 / 2", "simulated", "off by", "public: requests/s", "simulated")
    return (
        f"This simulates whole objects with the settings of the public demo ({public['source']}). Two figures were "
        f"fitted to its table: {fitted['stream_bytes_per_s'] / 1e6:.0f} MB/s per connection (first row) and "
        f"{fitted['bucket_bytes_per_s'] * 8e-12:.2f} Tbps for the bucket (rows of the plateau). Those rows therefore "
        f"fit by construction, and only the rows between them are predictions. {_steps(public)}\n\n"
        + table([*header, "step, s"], rows)
        + "\n"
    )


def _steps(public: Document) -> str:
    """How simulated steps compare with what was observed."""
    least, most = public["observed_step_s"]
    outside = [f"{r['nodes']:,}" for r in public["rows"] if not least <= r["simulated_step_s"] <= most]
    step_comparison = (
        f"at {sentence(outside)} nodes ours are outside that range" if outside else "ours are within that range"
    )
    return f"Its authors observed steps of {least:g} to {most:g} s; {step_comparison}."


def _rows(document: Document) -> str:
    """Every scenario's first epoch."""
    rows = [
        [
            row["mode"],
            f"{row['nodes']:,}",
            f"{row['seconds']:,.0f}",
            "" if row["samples_per_s"] is None else f"{row['samples_per_s']:,.0f}",
            f"{row['max_gbps']:,.0f}",
            f"{row['max_requests_per_s']:,.0f}",
            "" if row["stall_share"] is None else f"{row['stall_share']:.0%}",
            f"{row['bytes'] / 1e12:,.2f}",
            f"{row['wall_s']:.1f}",
        ]
        for row in document["rows"]
        if row["epoch"] == 1
    ]
    header = ("mode", "nodes", "epoch, s", "samples/s", "max Gbps", "max requests/s", "stall", "TB per epoch")
    return "First epochs:\n\n" + table([*header, "time to simulate, s"], rows)


def _check(check: Document) -> str:
    """Measured runs beside the same ones simulated."""
    rows = [
        [
            row["server"],
            f"{row['mode']}, cache {row['cache']}",
            f"{row['ranks']} ranks, {row['workers']} workers each",
            f"{row['step_time_s']:g}",
            f"{row['measured_samples_per_s']:.2f} ({row['measured_least']:.2f} to {row['measured_most']:.2f})",
            f"{row['simulated_samples_per_s']:.2f}",
            f"{row['error']:+.0%}",
            "" if row["measured_stall"] is None else f"{row['measured_stall']:.0%} / {row['simulated_stall']:.0%}",
            PurePath(row["file"]).name,
        ]
        for row in check["rows"]
    ]
    header = ("server", "mode", "processes", "step, s", "measured samples/s", "simulated", "off by")
    return (
        f"{check['within']} of {len(check['rows'])} simulated runs are within {check['tolerance']:.0%} of the measured "
        f"ones. The error is {check['mean_error']:.0%} on average and {check['largest_error']:.0%} at most. Bytes, "
        "requests and processor time per sample are taken from the measured run itself; the simulator predicts how "
        "they overlap.\n\n" + table([*header, "stall: measured / simulated", "file"], rows)
    )
