use super::figure::{Bound, Figure, TABLE};
use super::recipe::{Recipe, built_in, open};
use anemoe_gates::figures::NamedFigures;
use anemoe_gates::trace::{Fidelity, LayerTrace, Trace};
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn every_figure_has_a_name_of_its_own_and_gates() {
    let names: BTreeSet<&str> = TABLE.figures.iter().map(|f| f.name.as_str()).collect();
    assert!(names.len() == TABLE.figures.len() && names.len() > 60);
    assert!(TABLE.figures.iter().all(|f| !f.gates.is_empty() && !f.meaning.is_empty()));
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
        let mut figures = NamedFigures::default();
        figures.trace(&Trace { layers, f32_stream: false });
        let names = ["first", "middle", "last"].map(|name| format!("stack_cosine_{name}"));
        let names = names.into_iter().chain(["stack_cosine_min".into(), "stack_failed_layer".into()]);
        names.map(|name| figures.0.get(&name).copied()).collect::<Vec<_>>()
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
