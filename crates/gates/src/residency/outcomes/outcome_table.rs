//! Tables of outcomes: tab-separated, with a line of headings, columns in any order.
//!
//! ```text
//! outcomes.tsv of anemoe or of a report --------------------------------> cells --Row::of--> rows
//! columns model_or_op, graph_facts, quant, MB, shape/state --stated_cells--> cells
//! ```

use super::super::rule::{Chip, family_of};
use super::super::rules;
use super::row::{NEEDED, OutcomeCells, Row, TRAITS};

/// Table of published outcomes that anemoe ships.
pub const KNOWN: &str = include_str!("../outcomes.tsv");

/// Columns of the form in which outcomes are published.
const PUBLISHED: [&str; 6] = ["model_or_op", "graph_facts", "quant", "MB", "shape/state", "label"];

/// Reads a table.
///
/// # Errors
/// A needed column is missing, a line has too few cells, or a cell has an unknown value; the message names the line.
pub fn parse(text: &str) -> Result<Vec<Row>, String> {
    let mut lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'));
    let (_, headings) = lines.next().ok_or("it is empty")?;
    let headings: Vec<&str> = headings.split('\t').map(str::trim).collect();
    let typed = headings.contains(&"graph");
    let needed: &[&str] = if typed { &NEEDED } else { &PUBLISHED };
    if let Some(missing) = needed.iter().find(|n| !headings.contains(n)) {
        return Err(format!("no column `{missing}`"));
    }
    // Lines of people's tables end early where the last columns are empty.
    let last = headings.iter().position(|h| *h == "label").map_or(0, |at| at + 1);
    let least = if typed { headings.len() } else { last };
    let row = |(number, line): (usize, &str)| {
        let number = number + 1;
        let cells: Vec<&str> = line.split('\t').map(str::trim).collect();
        if cells.len() < least {
            return Err(format!("line {number}: {} cells of {least}", cells.len()));
        }
        let by_name = headings.iter().zip(cells).map(|(h, c)| (h.to_string(), c.to_string())).collect();
        let cells = if typed { by_name } else { stated_cells(&by_name, number) };
        Row::of(&cells).map_err(|what| format!("line {number}: {what}"))
    };
    lines.map(row).collect()
}

/// Finds typed cells in a published line: forms, sizes, op types and `name=number` of fixed spelling. What is said in
/// sentences stays unknown, and the outcome's details are not read.
fn stated_cells(line: &OutcomeCells, number: usize) -> OutcomeCells {
    let cell = |name: &str| line.get(name).map(String::as_str).unwrap_or_default();
    let [model, facts, shape, chip] = ["model_or_op", "graph_facts", "shape/state", "chip_os"].map(cell);
    let graph = Words::of(&[model, facts]);
    let all = Words::of(&[model, facts, shape]);
    let is_stateful = all.0.iter().any(|w| w.starts_with("mlstate") || w == "stateful");
    let states = all.before(&["states", "mlstates", "statetypes"]).unwrap_or(u64::from(is_stateful));
    let depth = graph.value("k=");
    let layers = graph.before(&["layers", "layer"]).or_else(|| {
        // `24L`
        graph.0.iter().find_map(|w| w.strip_suffix('l')?.parse().ok())
    });
    let kind = match depth {
        Some(_) if graph.has("conv") => "conv",
        Some(_) => "linear",
        None if layers.is_some() => "layers",
        None => "",
    };
    let tokens = ["t=", "m="].iter().find_map(|name| all.value(name));
    let tokens = tokens.or_else(|| all.value("s=").filter(|&n| !is_stateful || n == 1));
    let chip_of = chip.split([',', '/', '(']).map(str::trim).find(|t| Chip::parse(t).is_some());
    let is_phone =
        chip.to_ascii_lowercase().contains("iphone") || chip_of.is_some_and(|t| t.starts_with(['a', 'A']));
    let place = [shape, chip, facts].join(" ").to_ascii_lowercase().replace("units=", "units ");
    let units = if place.contains("units all") { "all" } else { "" };
    let os = chip.split(',').map(str::trim).filter(|t| Some(*t) != chip_of).collect::<Vec<_>>().join(" ");
    let text = |n: Option<u64>| n.map_or(String::new(), |n| n.to_string());
    let id = if cell("id").is_empty() { format!("line {number}") } else { cell("id").into() };
    let pairs = [
        ("id", id),
        ("project", family_of(cell("source")).into()),
        ("label", cell("label").into()),
        ("graph", kind.into()),
        ("weights", weights(cell("quant")).into()),
        ("mb", cell("MB").trim_start_matches(['~', '<', '?']).into()),
        ("ops", text(graph.before(&["ops", "op"]))),
        ("named", graph.ops()),
        ("depth", text(depth)),
        ("layers", text(layers)),
        ("tokens", text(tokens)),
        ("shapes", all.shapes(states > 0)),
        ("states", states.to_string()),
        ("traits", TRAITS.iter().filter(|t| graph.has(t)).copied().collect::<Vec<_>>().join(" ")),
        ("units", units.into()),
        ("target", if is_phone { "iphone" } else { "" }.into()),
        ("chip", chip_of.unwrap_or_default().into()),
        ("os", os),
        ("name", model.into()),
        ("source", cell("source").into()),
    ];
    pairs.into_iter().map(|(name, cell)| (name.to_string(), cell)).collect()
}

/// Reads a storage form as published, for instance `INT8 per_tensor` or `LUT4 kmeans per_grouped_channel g32`.
fn weights(quant: &str) -> &'static str {
    let quant = quant.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|w| quant.contains(w));
    let block = has(&["block", " bs", " g3", " g6", " g1"]);
    if has(&["lut", "palett", "pal4"]) {
        return match (has(&["row", "two"]), has(&["int8 entries", "int8-entry"]), has(&["scale", "chained"]))
        {
            (true, ..) => "lut4-two",
            (_, true, _) => "lut4-int8",
            (_, _, true) => "lut4-scaled",
            _ => "lut4",
        };
    }
    match (has(&["int4", "w4"]), has(&["int8", "w8"])) {
        // Both integer widths, without their places.
        (true, true) => "",
        // INT4 is stored per block: one scale for a channel of 4-bit integers is useless.
        (true, _) => "int4-block",
        (_, true) if block => "int8-block",
        (_, true) => "int8-tensor",
        _ if has(&["fp32"]) => "fp32",
        _ if has(&["fp16", "f16"]) => "fp16",
        _ => "",
    }
}

/// Lower-case words of published cells.
struct Words(Vec<String>);

impl Words {
    fn of(cells: &[&str]) -> Words {
        let split = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '(' | ')' | '+' | ':');
        let words = cells.iter().flat_map(|t| t.split(split)).filter(|w| !w.is_empty());
        // Op names may have an opset in front: `ios16.cumsum`.
        let plain = |w: &str| match w.split_once('.') {
            Some((opset, op)) if opset.starts_with("ios") => op.to_string(),
            _ => w.to_string(),
        };
        Words(words.map(|w| plain(&w.to_ascii_lowercase())).collect())
    }

    fn has(&self, word: &str) -> bool {
        self.0.iter().any(|w| w == word)
    }

    /// Returns the number before a word: `18 ops`.
    fn before(&self, units: &[&str]) -> Option<u64> {
        self.0.windows(2).find_map(|w| units.contains(&w[1].as_str()).then(|| w[0].parse().ok())?)
    }

    /// Returns the largest number after a name: `k=4096`.
    fn value(&self, name: &str) -> Option<u64> {
        let numbers = self.0.iter().filter_map(|w| w.strip_prefix(name)?.parse().ok());
        numbers.filter(|&n: &u64| n < 1 << 32).max()
    }

    /// Returns the op types that rules doubt, by their names in MIL. `shape` and `mod` are words of English, too.
    fn ops(&self) -> String {
        let searches = ["topk", "reduce_argmax", "reduce_argmin", "cast"];
        let doubted = rules::doubtful_types().filter(|t| !["shape", "mod"].contains(t)).chain(searches);
        let mut found: Vec<&str> = doubted.filter(|op| self.has(op)).collect();
        found.dedup();
        found.join(" ")
    }

    /// Returns the shapes. Beside a state, whose size is fixed, only the few tokens of a decoding step vary: 4.
    fn shapes(&self, stateful: bool) -> String {
        let any = |words: &[&str]| words.iter().any(|w| self.has(w));
        if any(&["enumerated", "enumeratedshapes"]) {
            return "enumerated".into();
        }
        if !any(&["rangedim", "ranged", "flexible", "dynamic"]) {
            return "fixed".into();
        }
        let last = |w: &String| w.split_once("..")?.1.trim_end_matches(']').parse::<u32>().ok();
        match self.0.iter().find_map(last).or(stateful.then_some(4)) {
            Some(n) => format!("range{n}"),
            None => "range".into(),
        }
    }
}
