//! Tests of the scores in the documentation, and of how rows are read.

use super::read::read;
use super::words::WordRow;
use super::{Design, KNOWN, Row, judge, leave_out_projects, parse, score};
use crate::residency::graph::{Graph, Shapes, StoredForm};
use crate::residency::rule::{DeviceTarget, Units};
use anemoe_convert::quant::Granularity;

#[test]
fn known_outcomes_are_judged_as_the_documentation_says() {
    let rows = parse(KNOWN).unwrap();
    let judged = judge(&rows);
    let s = score(&rows, &judged);
    let wrong: Vec<_> = judged.iter().filter(|j| j.right == Some(false)).collect();
    println!("{s:#?}\nwrong: {wrong:#?}");
    assert_eq!(s.rows, 180);
    assert!(s.accuracy >= Some(0.90) && s.unknown_share <= 0.30, "{wrong:#?}");
    assert!(s.rebuilt >= 40, "{s:?}");
}

/// Checks that each project's rows are predicted from the other projects' outcomes. Regression is the design in use.
#[test]
fn projects_that_are_left_out_are_predicted() {
    let rows = parse(KNOWN).unwrap();
    let [used, other] = [Design::Regression, Design::EvidenceSum].map(|d| leave_out_projects(&rows, d));
    for (name, s) in &used.projects {
        println!(
            "{name}: {} rows, decided {}, right {}, unknown {:.3}, brier {:.3}, forced {:.3}, majority {:.3}",
            s.rows, s.decided, s.right, s.unknown_share, s.brier, s.forced, s.majority
        );
    }
    println!("{:#?}\n{:#?}", used.all, other.all);
    assert!(used.all.accuracy >= Some(0.90) && used.all.unknown_share <= 0.30, "{:?}", used.all);
    assert!(used.all.forced >= used.all.majority + 0.08, "{:?}", used.all);
    assert!(used.all.brier < other.all.brier, "{:?}", other.all);
}

/// Checks that sizes from stated dimensions agree with stated sizes.
#[test]
fn rebuilt_programs_have_the_stated_size() {
    let mut rebuilt = 0;
    for row in parse(KNOWN).unwrap() {
        let mut unsized_row = row.clone();
        unsized_row.sketch.bytes = None;
        let read = read(&unsized_row.sketch);
        let (Some(bytes), Some(stated)) =
            (read.facts.weight_bytes.filter(|_| read.rebuilt), row.sketch.bytes)
        else {
            continue;
        };
        rebuilt += 1;
        // Sizes are stated in MB or MiB, rounded, and some are estimates.
        let off = bytes as f64 / stated as f64;
        assert!(
            (0.88..1.12).contains(&off) || stated < 1_000_000,
            "{}: {bytes} bytes, {stated} stated",
            row.id
        );
    }
    assert!(rebuilt >= 35, "{rebuilt}");
}

fn row(model: &str, facts: &str, quant: &str, mb: f64, shape: &str, chip: &str) -> Row {
    let text = str::to_string;
    let words = WordRow {
        model: text(model),
        facts: text(facts),
        quant: text(quant),
        mb: Some(mb),
        shape: text(shape),
        chip: text(chip),
        label: "ANE_ALL".into(),
        ..WordRow::default()
    };
    words.read()
}

fn graph(row: &Row) -> Graph {
    read(&row.sketch).facts.graphs.remove(0)
}

#[test]
fn words_become_facts() {
    let r = row(
        "LM head",
        "d2560 -> ~64k",
        "LUT4 per_grouped_channel g32",
        80.0,
        "T=1",
        "iPhone 17 Pro (A19 Pro)",
    );
    assert_eq!((r.conditions.target, r.conditions.chip.map(|c| c.number)), (DeviceTarget::Iphone, Some(19)));
    let g = graph(&r);
    let op = &g.ops[0];
    assert_eq!(op.contraction.as_ref().unwrap().depth, Some(2560));

    let r = row(
        "3 layers",
        "no gather, argmax removed, 60 ops",
        "INT8 per_channel",
        90.0,
        "2 states, RangeDim T1..16",
        "M2, units ALL",
    );
    let g = graph(&r);
    assert!(g.ops.iter().all(|op| op.op_type == "linear"), "{:?}", g.ops);
    assert_eq!((g.shapes, g.states.len(), g.op_count), (Shapes::Ranged(Some(16)), 2, Some(60)));
    assert_eq!(g.weights[0].form, StoredForm::Linear { bits: 8, grain: Granularity::Channel });
    assert_eq!(r.conditions.units, Units::All);

    let r = row("decoder", "lstm, 24 ops", "fp16", 20.0, "stateless T=1", "M5");
    assert!(graph(&r).ops.iter().any(|op| op.op_type == "lstm"));
}

#[test]
fn what_a_row_did_is_not_read() {
    let rows = parse(KNOWN).unwrap();
    let turned: Vec<Row> = rows
        .iter()
        .map(|r| Row {
            label: if r.label == "ANE_ALL" { "CPU_ALL" } else { "ANE_ALL" }.into(),
            project: String::new(),
            id: "x".into(),
            ..r.clone()
        })
        .collect();
    for (a, b) in judge(&rows).iter().zip(judge(&turned)) {
        assert_eq!(a.verdict, b.verdict, "{}", a.id);
    }
}

#[test]
fn tables_that_are_none_are_refused() {
    for (text, says) in [
        ("", "empty"),
        ("a\tb\n", "no column `model_or_op`"),
        ("id\tmodel_or_op\tgraph_facts\tquant\tMB\tshape/state\tlabel\nx\ty\n", "line 2"),
        (
            "id\tmodel_or_op\tgraph_facts\tquant\tMB\tshape/state\tlabel\nx\ty\tz\tq\tmuch\ts\tANE_ALL\n",
            "much",
        ),
        ("id\tmodel_or_op\tgraph_facts\tquant\tMB\tshape/state\tlabel\nx\ty\tz\tq\t-1\ts\tANE_ALL\n", "-1"),
    ] {
        let message = parse(text).unwrap_err();
        assert!(message.contains(says), "{message}");
    }
    // Labels without an outcome are not counted.
    let rows =
        parse("model_or_op\tgraph_facts\tquant\tMB\tshape/state\tlabel\nx\ty\tz\t?\ts\tNOT_RUN\n").unwrap();
    let s = score(&rows, &judge(&rows));
    assert_eq!((s.rows, s.unknown), (0, 0));
}

/// Checks that rows of odd text are read without a panic.
#[test]
fn odd_text_is_no_danger() {
    for text in [
        "->",
        "-> ->",
        "d3072 ->",
        "a->b",
        "k=99999999999999999999",
        "0^9",
        "x",
        "1x0x0",
        "heads",
        "RangeDim ..",
        "99999 layers d1 dff1 1 heads",
        "0 layers d0 dff0 0/0 heads",
        "d16777215 dff16777215 16777215/1 heads 200 layers T=600 S=33 16777215x16777215x16777215x16777215",
    ] {
        let r = row(text, text, text, 1.0, text, text);
        let _ = judge(std::slice::from_ref(&r));
        let linear = row(&format!("linear {text}"), text, "fp16", 1.0, text, text);
        let _ = judge(std::slice::from_ref(&linear));
    }
}
