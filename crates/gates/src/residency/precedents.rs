//! Precedents: measured graphs of the same kind and form as a function, nearest to it in size.
//!
//! ```text
//! size:      4 MB    5 MB            19 MB   ?     40 MB         kind `layers`, weights in INT8
//! measured:  ane     ane             ane  <--+-->  ane           both agree: ane
//! ```

use super::matchers::MANY_POSITIONS;
use super::outcomes::{KNOWN, Row, parse};
use super::rule::{Conditions, DeviceTarget, Units, Verdict};
use super::rules;
use crate::program_facts::graph::{FormClass, Graph, GraphKind};
use std::sync::{Arc, LazyLock};

/// Factor of size by which a function may lie beyond all measured graphs, and be judged by the last of them. Between
/// agreeing measurements of one form, the widest step is 2.2 (tables, 46 to 101 MB) or 2 (INT8, 96 to 192 MB).
const REACH: f64 = 2.0;
/// Factor within which sizes count as equal. Published sizes are rounded.
const EQUAL: f64 = 1.02;

/// Measured graphs by which others are judged.
#[derive(Debug)]
pub struct Precedents {
    rows: Vec<Row>,
}

/// Measured graphs that are nearest to a function.
#[derive(Default)]
pub struct Nearest<'a> {
    /// Verdict in which they agree, else `unknown`.
    pub verdict: Verdict,
    /// False if the function is larger or smaller than all graphs of its kind and form, and out of their reach.
    pub in_reach: bool,
    /// Rows of the measured graphs.
    pub rows: Vec<&'a Row>,
}

/// Properties in which graphs have to be equal to be compared.
#[derive(PartialEq)]
struct GraphKey {
    kind: GraphKind,
    form: FormClass,
    target: DeviceTarget,
    units: Units,
    many_positions: bool,
}

fn has_many_positions(g: &Graph) -> bool {
    g.positions.is_some_and(|p| p >= MANY_POSITIONS)
}

fn key(g: &Graph, c: &Conditions) -> Option<GraphKey> {
    let many_positions = has_many_positions(g);
    Some(GraphKey { kind: g.kind, form: g.form()?, target: c.target, units: c.units, many_positions })
}

fn factor(a: u64, b: u64) -> f64 {
    a.max(b) as f64 / a.min(b).max(1) as f64
}

impl Precedents {
    /// Returns the outcomes that anemoe ships.
    pub fn known() -> Arc<Precedents> {
        static ROWS: LazyLock<Arc<Precedents>> = LazyLock::new(|| {
            Arc::new(Precedents::of(&parse(KNOWN).unwrap_or_else(|e| panic!("outcomes.tsv: {e}"))))
        });
        ROWS.clone()
    }

    /// Takes the rows that can be compared: those of one function, against which no rule speaks. An outcome that a rule
    /// explains says nothing of a graph to which the rule does not apply.
    pub fn of(rows: &[Row]) -> Precedents {
        let explained = |row: &Row| {
            let p = row.package();
            let mut against = rules::all().filter(|r| r.decides() && r.verdict != Verdict::Ane);
            against.any(|r| r.applies(&p, &row.conditions))
        };
        let sized =
            |row: &&Row| row.graphs.len() == 1 && row.graphs[0].size().is_some() && row.truth().is_some();
        Precedents { rows: rows.iter().filter(sized).filter(|row| !explained(row)).cloned().collect() }
    }

    /// Returns these precedents and others.
    pub fn and(&self, rows: &[Row]) -> Precedents {
        let others = Precedents::of(rows);
        Precedents { rows: self.rows.iter().cloned().chain(others.rows).collect() }
    }

    /// Returns the precedents that pass a test.
    pub fn retain(&self, test: impl Fn(&Row) -> bool) -> Precedents {
        Precedents { rows: self.rows.iter().filter(|row| test(row)).cloned().collect() }
    }

    /// Finds the measured graphs that are nearest to a function: on both sides in size, or on one side within
    /// [`REACH`]. `None` where nothing of its kind and form was measured.
    pub fn nearest(&self, g: &Graph, c: &Conditions) -> Option<Nearest<'_>> {
        let size = g.size()?;
        let all = if g.has_unnamed_ops() { self.same_network(g, c, size) } else { self.alike(g, c) };
        let sizes = || all.iter().filter_map(|row| row.graphs[0].size());
        let equal = |n: &u64| factor(*n, size) < EQUAL;
        let below = sizes().filter(|n| *n <= size || equal(n)).max();
        let above = sizes().filter(|n| *n >= size || equal(n)).min();
        let mut ends: Vec<u64> = below.into_iter().chain(above).collect();
        if ends.iter().any(equal) {
            ends.retain(equal);
        }
        let in_reach = match ends.as_slice() {
            [] => return None,
            [only] => factor(*only, size) <= REACH,
            _ => true,
        };
        let is_end = |row: &&Row| row.graphs[0].size().is_some_and(|n| ends.contains(&n));
        let rows: Vec<&Row> = all.into_iter().filter(is_end).collect();
        let mut verdicts = rows.iter().filter_map(|row| row.truth());
        let first = verdicts.next()?;
        let agree = in_reach && verdicts.all(|v| v == first);
        Some(Nearest { verdict: if agree { first } else { Verdict::Unknown }, in_reach, rows })
    }

    /// Lists rows of the same kind and form. A graph of a kind that is not stated is compared with all but lone products.
    fn alike(&self, g: &Graph, c: &Conditions) -> Vec<&Row> {
        let Some(wanted) = key(g, c).filter(|k| k.form != FormClass::Other) else { return Vec::new() };
        let is_alike = |row: &&Row| {
            let own = &row.graphs[0];
            let comparable =
                wanted.kind == GraphKind::Unstated && !own.kind.is_lone() && own.kind != GraphKind::Other;
            let kind = if comparable { GraphKind::Unstated } else { own.kind };
            let found = key(own, &row.conditions).map(|k| GraphKey { kind, ..k });
            kind != GraphKind::Other && !own.has_unnamed_ops() && found.as_ref() == Some(&wanted)
        };
        self.rows.iter().filter(is_alike).collect()
    }

    /// Lists rows of as many ops and the same size: networks whose ops are not named are compared with themselves alone.
    fn same_network(&self, g: &Graph, c: &Conditions, size: u64) -> Vec<&Row> {
        let is_same = |row: &&Row| {
            let own = &row.graphs[0];
            own.op_count == g.op_count
                && own.size().is_some_and(|n| factor(n, size) < EQUAL)
                && (row.conditions.target, row.conditions.units) == (c.target, c.units)
        };
        self.rows.iter().filter(is_same).collect()
    }
}
