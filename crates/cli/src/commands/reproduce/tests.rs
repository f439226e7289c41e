use super::figure::{Bound, Figure, TABLE, figures};
use super::recipe::{Recipe, RecipeCommand, built_in, open};
use anemoe_gates::facts;
use anemoe_gates::trace::{Fidelity, LayerTrace, Trace};
use anemoe_runtime::speculate::break_even;
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn every_figure_has_a_name_of_its_own_and_gates() {
    let names: BTreeSet<&str> = TABLE.figures.iter().map(|f| f.name.as_str()).collect();
    assert!(names.len() == TABLE.figures.len() && names.len() > 60);
    assert!(TABLE.figures.iter().all(|f| !f.gates.is_empty() && !f.meaning.is_empty()));
    assert!(TABLE.figures.iter().all(|f| f.gates.iter().all(|gate| f.program(*gate).is_ok())));
    let said = Figure::find("shard_gb").err().unwrap();
    assert!(said.contains("`shard_gb`") && said.contains("shard_mb, "), "{said}");
}

#[test]
fn bounds_hold_to_their_digits() {
    let bound = |text: &str| Bound::try_from(toml::Value::from(text));
    let size = Figure::find("shard_mb").unwrap();
    for (text, found, holds) in [
        ("101.2", 101.249, true),
        ("101.2", 101.26, false),
        ("202", 201.99, true),
        ("202", 202.6, false),
        ("<110", 110.0, false),
        ("<=110", 110.0, true),
        (">8.59", 8.6, true),
        ("about 35", 38.0, true),
        ("about 35", 39.0, false),
        (">= .97", 0.97, true),
        ("-1.5", -1.5, true),
    ] {
        assert_eq!(size.keeps(&bound(text).unwrap(), found), holds, "{text} {found}");
    }
    let counted = Figure::find("pack_conv_ops").unwrap();
    let exact = bound("36").unwrap();
    assert!(counted.keeps(&exact, 36.0) && !counted.keeps(&exact, 36.4));
    assert_eq!((exact.to_json(), bound("<110").unwrap().to_json()), (36.0.into(), "<110".into()));
    for wrong in ["", "<", "nan", "inf", "<inf", "1e999", "twelve", "1..2", "about", "<<1"] {
        assert!(bound(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_trace_gives_its_cascade() {
    let layer = |boundary: usize, min_cosine: f64, mean_cosine: f64| LayerTrace {
        boundary,
        fidelity: Fidelity { min_cosine, position: 0, mean_cosine },
        fp16_stream: None,
        largest: 1.0,
        rms: 1.0,
        stream_to_change: None,
        positions: Vec::new(),
    };
    let read = |layers: Vec<LayerTrace>| {
        let document = serde_json::to_value(Trace { layers, f32_stream: false }).unwrap();
        let figures = figures(RecipeCommand::Trace, &facts::of(document));
        let names = ["first", "middle", "last"].map(|name| format!("stack_cosine_{name}"));
        let names = names.into_iter().chain(["stack_cosine_min".into(), "stack_failed_layer".into()]);
        names.map(|name| figures.get(&name).copied()).collect::<Vec<_>>()
    };
    let whole = [(0, 1.0, 1.0), (1, 0.99, 0.998), (2, 0.98, 0.99), (3, 0.96, 0.98), (4, 0.9, 0.95)];
    let some = |values: [f64; 5]| values.map(Some).to_vec();
    assert_eq!(
        read(whole.map(|(b, min, mean)| layer(b, min, mean)).into()),
        some([0.998, 0.99, 0.95, 0.9, 2.0])
    );
    let one = read(vec![layer(0, 1.0, 1.0), layer(1, 0.99, 0.998)]);
    assert_eq!(one, [Some(0.998), Some(0.998), Some(0.998), Some(0.99), None]);
    assert_eq!(read(vec![layer(0, 1.0, 1.0)]), [None, None, None, Some(1.0), None]);
}

#[test]
fn built_in_recipes_are_right() {
    assert!(built_in().unwrap().iter().all(|recipe| !recipe.figures.is_empty()));
    assert_eq!(open(Path::new("Exp 36")).unwrap().name, open(Path::new("T4.4")).unwrap().name);
}

#[test]
fn wrong_recipes_are_refused_by_what_is_known() {
    let good = "title = 'a'\nintent = 'b'\nsource = 'c'\ngates = ['plan']\n[[builds]]\nname = 'x'\n\
                [[figures]]\nfigure = 'shards'\nunit = 'packages'\nbook = 3\nfrom = 'd'\n";
    let hash = |text: &str| Recipe::parse("good", text).unwrap().sha256;
    assert_eq!(hash(good), hash(&format!("lesson = 'e'\n{good}").replace("book = 3", "book = 4")));
    assert_ne!(hash(good), hash(&good.replace("name = 'x'", "name = 'y'")));
    for (old, new, says) in [
        ("title", "titel", "expected one of `title`, `intent`"),
        ("'plan'", "'plans'", "expected one of `plan`, `build`"),
        ("'shards'", "'shardz'", "shard_mb"),
        ("unit = 'packages'\n", "", "has no unit; it is given in packages"),
        ("'packages'", "'MB'", "is given in packages, not in MB"),
        ("book = 3", "book = 'three'", "is not a number"),
        ("book = 3", "book = [3]", "neither a number"),
        ("from = 'd'", "from = 'd'\nbuild = 'y'", "no build is named `y`; there are: x"),
        ("'shards'\nunit = 'packages'", "'drafted'\nunit = 'tokens'", "comes from generate"),
        ("name = 'x'", "name = '../x'", "letters, digits"),
        ("from = 'd'", "from = 'd'\nwhy = 'luck'", "say what ours is"),
        ("from = 'd'", "from = 'd'\nours = 4", "say why"),
        ("from = 'd'", "from = 'd'\nwhy = 'luck'\nours = []", "neither a number"),
        ("gates = ['plan']", "gates = ['plan', 'build', 'validate']", "needs prompt_ids"),
        ("gates = ['plan']", "gates = ['check', 'plan']", "`check` needs the bundle that `build` makes"),
        ("title = 'a'", "title = 'a", "line 1"),
        ("title = 'a'", "title = 'a'\nlayers = 0", "at least one"),
        ("name = 'x'", "name = 'x'\noptions = ['--quant', 'lut4', 'y']", "build `x`: `y` for `build`"),
        ("name = 'x'", "name = 'x'\noptions = ['--out=y']", "`--out=y`"),
        ("name = 'x'", "name = 'x'\noptions = ['-oy']", "`-oy`"),
        ("name = 'x'", "name = 'x'\noptions = ['--quant', '--force']", "`--force`"),
        ("name = 'x'", "name = 'x'\noptions = ['--', 'y']", "`--`"),
        ("name = 'x'", "name = 'x'\ngates.build = ['--skip-gates', '--push=s3://y']", "`--push=s3://y`"),
        ("name = 'x'", "name = 'x'\ngates.bench = ['--save', 'y']", "`--save` for `bench`"),
        ("name = 'x'", "name = 'x'\ngates.validate = ['--scratch=y']", "folder of the run"),
        ("name = 'x'", "name = 'x'\ngates.generate = ['--compiled=y']", "`--compiled=y`"),
        ("[[builds]]", "[options]\nplan = ['--out=y']\n[[builds]]", "[options]: `--out=y` for `plan`"),
        ("from = 'd'", "from = 'd'\nneeds = 'luck'", "expected one of `nothing`, `weights`, `mac`"),
    ] {
        assert!(good.contains(old), "{old}");
        let said = format!("{:#}", Recipe::parse("bad", &good.replacen(old, new, 1)).err().unwrap());
        assert!(said.contains(says), "{new}: {said}");
    }
}

// The field notes' arithmetic; `docs/recipes.md` has the table.

/// Seconds of verifier calls, and number of these calls.
const CALLS: (f64, f64) = (15.455, 32.0);
/// Tokens per second without drafts.
const PLAIN: f64 = 9.25;

/// Computes `(1 - p^(k + 1)) / (1 - p)`: the expected tokens of a call with `k` drafted tokens, each accepted with
/// probability `p` if those before it are.
fn expected(p: f64, k: i32) -> f64 {
    (1.0 - p.powi(k + 1)) / (1.0 - p)
}

#[test]
fn counts_and_times_are_right() {
    assert_eq!(32 * 3, 96);
    assert_eq!(32 + 7 + 1, 40);
    assert_eq!(format!("{:.1}", 100.0 * 7.0 / 96.0), "7.3");
    assert_eq!(format!("{:.0}", 1e3 * CALLS.0 / CALLS.1), "483");
    assert_eq!(format!("{:.1}", 100.0 * (PLAIN / 8.59 - 1.0)), "7.7");
}

#[test]
fn break_even_and_projection_are_not() {
    let call = CALLS.0 / CALLS.1;
    let cost = call * 1e3 / 109.0;
    assert_eq!(format!("{cost:.2}"), "4.43");
    assert_eq!(format!("{:.2}", 1.0 - 1.0 / (cost / 4.0)), "0.10");
    assert_eq!(break_even(cost, 3), None, "four tokens at most cannot pay for 4.43");
    // If a call costs less than its most tokens, drafts pay from the `p` whose expected tokens equal the cost.
    let p = break_even(2.53, 3).unwrap();
    assert!((p - 0.7).abs() < 0.01, "{p}");
    assert_eq!(format!("{:.1}", (1.0 + 3.0 * 0.7) / call), "6.4");
    assert_eq!(format!("{:.2}", expected(0.7, 3)), "2.53");
    assert_eq!(format!("{:.2}", expected(0.7, 3) / call), "5.24");
    assert!(expected(1.0 - 1e-9, 3) / call < PLAIN);
}

#[test]
fn bytes_a_second_are_not_the_bound_at_lut4() {
    // GB per token (docs/recipes.md) times tokens per second; 119 GB/s were measured on an M4 Max.
    let (lut4, int8) = (4.54 * PLAIN, 8.84 * 8.59);
    assert_eq!((format!("{lut4:.0}"), format!("{int8:.0}")), ("42".into(), "76".into()));
    assert!(lut4 < 0.6 * int8 && int8 < 0.7 * 119.0);
}
