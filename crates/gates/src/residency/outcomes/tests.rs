//! Tests of the scores in the documentation, and of how rows are read.

use super::{KNOWN, Row, Score, judge, leave_out_projects, parse, score};
use crate::program_facts::graph::{GraphKind, Shapes, StoredForm};
use crate::residency::rule::{DeviceTarget, Units, Verdict};
use anemoe_convert::quant::Granularity;

const HEADINGS: &str =
    "id\tmodel_or_op\tgraph_facts\tquant\tMB\tshape/state\tchip_os\tlabel\tdetail\tsource\n";

fn is_good(s: &Score) -> bool {
    s.accuracy >= Some(0.85) && s.unknown_share <= 0.35 && s.forced >= s.majority
}

/// Checks the figures that the documentation states, with and without what a row's own project found.
#[test]
fn known_outcomes_are_judged_as_the_documentation_says() {
    let rows = parse(KNOWN).unwrap();
    for judged in [judge(&rows), leave_out_projects(&rows)] {
        let s = score(rows.iter().zip(&judged));
        let wrong: Vec<_> = judged.iter().filter(|j| j.right == Some(false)).collect();
        assert_eq!(s.rows, 180);
        assert!(is_good(&s), "{s:#?}\nwrong: {wrong:#?}");
    }
}

fn row(model: &str, facts: &str, quant: &str, mb: &str, shape: &str, chip: &str) -> Row {
    let line = ["x", model, facts, quant, mb, shape, chip, "ANE_ALL", "", "me"].join("\t");
    parse(&format!("{HEADINGS}{line}\n")).unwrap().remove(0)
}

#[test]
fn published_lines_become_typed_cells() {
    let r = row("single linear", "k=2560 n=64000", "LUT4 g32", "80", "T=1", "iPhone 17 Pro (A19 Pro)");
    assert_eq!((r.conditions.target, r.conditions.chip.map(|c| c.number)), (DeviceTarget::Iphone, Some(19)));
    let g = &r.graphs[0];
    assert_eq!((g.kind, g.size(), g.weight_bytes), (GraphKind::Linear, Some(2560), Some(80_000_000)));

    let shape = "2 states, RangeDim T1..16";
    let r = row("3 layers", "ios18.lstm, 60 ops", "INT8 per_tensor", "90", shape, "M2, units ALL");
    let g = &r.graphs[0];
    assert!(g.ops.iter().any(|op| op.op_type == "lstm"), "{:?}", g.ops);
    assert_eq!((g.shapes, g.states.len(), g.op_count), (Shapes::Ranged(Some(16)), 2, Some(60)));
    assert_eq!(g.weights[0].form, StoredForm::Linear { bits: 8, grain: Granularity::Tensor });
    assert_eq!(r.conditions.units, Units::All);
}

/// Checks that a row is judged by its facts alone: another label or source changes nothing.
#[test]
fn what_a_row_did_is_not_read() {
    let rows = parse(KNOWN).unwrap();
    let turned = |r: &Row| Row {
        label: if r.truth() == Some(Verdict::Ane) { "CPU_ALL" } else { "ANE_ALL" }.into(),
        project: String::new(),
        source: String::new(),
        ..r.clone()
    };
    let turned: Vec<Row> = rows.iter().map(turned).collect();
    for (a, b) in judge(&rows).iter().zip(judge(&turned)) {
        assert_eq!(a.verdict, b.verdict, "{}", a.id);
    }
}

#[test]
fn tables_that_are_none_are_refused() {
    for (text, says) in [
        (String::new(), "empty"),
        ("a\tb\n".into(), "no column `model_or_op`"),
        (format!("{HEADINGS}x\ty\n"), "line 2"),
        (format!("{HEADINGS}x\ty\tz\tq\tmuch\ts\tM4\tANE_ALL\n"), "much"),
        (format!("{HEADINGS}x\ty\tz\tq\t-1\ts\tM4\tANE_ALL\n"), "-1"),
        (
            KNOWN.replacen("\tANE_ALL\tlayers\t", "\tANE_ALL\tcastle\t", 1),
            "`castle` is not a value of `graph`",
        ),
        (KNOWN.replacen("\tint8-tensor\t", "\tint9-tensor\t", 1), "int9-tensor"),
    ] {
        let message = parse(&text).unwrap_err();
        assert!(message.contains(says), "{message}");
    }
    // Labels without an outcome are not counted.
    let rows = parse(&format!("{HEADINGS}x\ty\tz\t?\t?\ts\tM4\tNOT_RUN\n")).unwrap();
    let s = score(rows.iter().zip(&judge(&rows)));
    assert_eq!((s.rows, s.unknown, s.accuracy), (0, 0, None));
}

/// Checks that rows of odd text are read without a panic.
#[test]
fn odd_text_is_no_danger() {
    for text in [
        "->",
        "k=99999999999999999999",
        "k=4294967295 n=4294967295",
        "x",
        "RangeDim ..",
        "RangeDim 0..4294967295]",
        "99999999999 layers, 99999999999 ops",
        "18446744073709551615 states mlstate",
        "t=0 m=0 s=0",
        "\u{e9}\u{301}",
    ] {
        for mb in ["1e300", "0", "?"] {
            let line = ["x", text, text, text, mb, text, text, "ANE_ALL", "", "me"].join("\t");
            if let Ok(rows) = parse(&format!("{HEADINGS}{line}\n")) {
                let _ = judge(&rows);
                let _ = leave_out_projects(&rows);
            }
        }
    }
}
