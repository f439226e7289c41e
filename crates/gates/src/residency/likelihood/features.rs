//! Features of a function: properties that graphs share, as numbers.
//!
//! Each value is near 0 for a common graph, and graphs that differ are about 1 apart, so that one strength of
//! regularization fits all.

use super::super::graph::{Graph, LAYER_OPS, Op, SMALL_CONSTANT, Shapes, StoredForm};
use super::super::rule::{Conditions, Units};
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::DataType;

/// Feature of a function.
pub struct GraphFeature {
    /// Name of the feature, stable.
    pub name: &'static str,
    /// Meaning of a large value, for the list of influences.
    pub text: &'static str,
    /// Weight before any outcome is seen, by general knowledge: the ANE gains by work and loses by calls. Apple
    /// recommends whole layers of 1x1 convolutions with tables or INT8, and fixed shapes.
    pub prior: f64,
    /// Computes the value of the feature.
    pub value: fn(&FunctionView<'_>) -> f64,
}

/// Function with values that several features need.
pub struct FunctionView<'a> {
    g: &'a Graph,
    c: &'a Conditions,
    /// Multiply-adds of a call, where the weights are known.
    work: Option<f64>,
    /// Share of the weights' bytes that are stored with tables.
    tables: f64,
    /// Share of the weights' bytes that are stored as 8-bit integers with a scale per tensor or channel.
    integers: f64,
}

/// Depth from which on Core ML gives a lone fp16 product of one vector to the ANE: between 4864 and 5120.
const LONE_DEPTH: f64 = 4992.0;
/// Multiply-adds of a call of a 32 MB graph in fp16 for one token: the middle of the measured graphs.
const MIDDLE_WORK: f64 = 16e6;
/// Positions of a call from which on a graph has the work of a prompt.
const PROMPT: u64 = 64;
/// Bytes of weights from which on programs approach their largest size.
const LARGE: f64 = 1e9;

impl<'a> FunctionView<'a> {
    fn new(g: &'a Graph, c: &'a Conditions) -> FunctionView<'a> {
        let sized = |wanted: fn(&StoredForm) -> bool| -> f64 {
            let bytes = |of: &dyn Fn(&StoredForm) -> bool| {
                g.weights.iter().filter(|w| of(&w.form)).fold(0u64, |n, w| n.saturating_add(w.bytes)) as f64
            };
            let all = bytes(&|_| true);
            if all > 0.0 {
                bytes(&wanted) / all
            } else {
                f64::from(g.weights.iter().any(|w| wanted(&w.form)))
            }
        };
        let tables = sized(|f| matches!(f, StoredForm::Lut { .. }));
        let integers = sized(|f| {
            matches!(f, StoredForm::Linear { bits: 8, grain: Granularity::Tensor | Granularity::Channel })
        });
        let positions = g.positions.unwrap_or(1).max(1) as f64;
        let stored = |bytes: u64| bytes as f64 * 8.0 / bits(g) * positions;
        let work = g.weight_bytes.filter(|_| !g.weights.is_empty()).map(stored).or_else(|| {
            let between = g.ops.iter().filter_map(|op| op.contraction.as_ref());
            let product = between.map(|c| Some([c.depth?, c.outputs?, c.positions?].map(|n| n as f64)));
            product.map(|p| p.map(|[k, n, m]| k * n * m)).sum::<Option<f64>>().filter(|&w| w > 0.0)
        });
        FunctionView { g, c, work, tables, integers }
    }

    fn matrices(&self) -> u64 {
        self.g.matrix_count.unwrap_or_else(|| self.g.matrices().count() as u64)
    }

    fn lone(&self) -> bool {
        self.g.at_least_ops() < LAYER_OPS && self.matrices() <= 1 && !self.g.glue
    }

    fn has_few_ops(&self) -> bool {
        self.g.at_least_ops() < LAYER_OPS && self.matrices() > 1
    }

    fn layers(&self) -> bool {
        self.g.at_least_ops() >= LAYER_OPS && self.g.matrix_count.is_none_or(|n| n >= 2) && !self.g.glue
    }

    fn attends(&self) -> bool {
        let attends = |op: &Op| {
            op.op_type == "scaled_dot_product_attention"
                || op.op_type == "softmax"
                || op.contraction.as_ref().is_some_and(|c| c.between_activations)
        };
        self.g.layers.is_some_and(|n| n > 0) || !self.g.states.is_empty() || self.g.ops.iter().any(attends)
    }
}

fn flag(value: bool) -> f64 {
    f64::from(value)
}

/// Returns the bits per weight of the largest weight.
fn bits(g: &Graph) -> f64 {
    let largest = g.weights.iter().max_by_key(|w| w.bytes).map(|w| &w.form);
    match largest {
        Some(StoredForm::Lut { bits, .. } | StoredForm::Linear { bits, .. }) => *bits as f64,
        Some(StoredForm::Dense(DataType::Float32)) => 32.0,
        _ => 16.0,
    }
}

/// All features, in the order of their values.
pub static FEATURES: &[GraphFeature] = &[
    GraphFeature {
        name: "work",
        text: "multiply-adds of a call (powers of ten above 16 million)",
        prior: 1.0,
        value: |v| v.work.map_or(0.0, |w| libm::log10(w.max(1.0) / MIDDLE_WORK).clamp(-2.5, 1.5)),
    },
    GraphFeature {
        name: "no_size",
        text: "the size of its weights is not known",
        prior: -0.5,
        value: |v| flag(v.work.is_none()),
    },
    GraphFeature {
        name: "layers",
        text: "products with the ops of a layer around them",
        prior: 2.0,
        value: |v| flag(v.layers()),
    },
    GraphFeature {
        name: "lone",
        text: "one product, or a handful of ops",
        prior: -1.0,
        value: |v| flag(v.lone()),
    },
    GraphFeature {
        name: "few",
        text: "several products with little around them",
        prior: 0.0,
        value: |v| flag(v.has_few_ops()),
    },
    GraphFeature {
        name: "lone_depth",
        text: "depth of a lone product with stored weights (doublings above 4992)",
        prior: 0.7,
        value: |v| {
            let depth = v.g.matrices().next().and_then(|(_, c)| c.depth).filter(|_| v.lone());
            depth.map_or(0.0, |k| libm::log2(k.max(1) as f64 / LONE_DEPTH).clamp(-2.0, 2.0))
        },
    },
    GraphFeature { name: "tables", text: "weights stored with tables", prior: 0.5, value: |v| v.tables },
    GraphFeature {
        name: "integers",
        text: "weights stored as INT8 with a scale for a tensor or channel",
        prior: 0.5,
        value: |v| v.integers,
    },
    GraphFeature {
        name: "blocks",
        text: "weights stored as integers with a scale for a block, or in fewer than 8 bits",
        prior: -1.5,
        value: |v| {
            let odd = |f: &StoredForm| {
                matches!(
                    f,
                    StoredForm::Linear { grain: Granularity::Block, .. }
                        | StoredForm::Linear { bits: 0..=7, .. }
                )
            };
            flag(v.g.weights.iter().any(|w| odd(&w.form)))
        },
    },
    GraphFeature {
        name: "unstated",
        text: "how the weights are stored is not known",
        prior: 0.0,
        value: |v| flag(v.g.weights.iter().any(|w| w.form == StoredForm::Unstated)),
    },
    GraphFeature {
        name: "attention",
        text: "attention, or a cache",
        prior: 0.0,
        value: |v| flag(v.attends()),
    },
    GraphFeature {
        name: "state",
        text: "a state that the graph changes",
        prior: 0.0,
        value: |v| flag(!v.g.states.is_empty()),
    },
    GraphFeature {
        name: "conv",
        text: "all products are convolutions",
        prior: 0.5,
        value: |v| {
            let mut all = v.g.matrices().peekable();
            flag(all.peek().is_some() && all.all(|(op, _)| op.op_type == "conv"))
        },
    },
    GraphFeature {
        name: "converted",
        text: "ops that the source counts and does not name, in a network that it does not describe (powers of ten)",
        prior: -1.5,
        value: |v| {
            let named = v.g.ops.len() as u64;
            let layers = LAYER_OPS * v.g.layers.unwrap_or(1).max(1);
            let described = if v.g.op_count == Some(named) { named } else { named.max(layers) };
            v.g.op_count.map_or(0.0, |n| libm::log10((n as f64 / described.max(1) as f64).max(1.0)))
        },
    },
    GraphFeature {
        name: "prompt",
        text: "64 positions a call and more",
        prior: 0.5,
        value: |v| flag(v.g.positions.is_some_and(|p| p >= PROMPT)),
    },
    GraphFeature {
        name: "flexible",
        text: "flexible shapes of more than 4 sizes",
        prior: -1.5,
        value: |v| match v.g.shapes {
            Shapes::Fixed => 0.0,
            Shapes::Ranged(Some(n)) if n <= 4 => 0.0,
            _ => 1.0,
        },
    },
    GraphFeature {
        name: "large",
        text: "bytes of weights (doublings above 1 GB)",
        prior: -0.5,
        value: |v| v.g.weight_bytes.map_or(0.0, |b| libm::log2(b as f64 / LARGE).clamp(0.0, 2.0)),
    },
    GraphFeature {
        name: "head",
        text: "layers and a vocabulary in one program",
        prior: -0.5,
        value: |v| flag(v.g.vocabulary_head && v.layers()),
    },
    GraphFeature {
        name: "gpu",
        text: "the GPU is allowed, and a call is no prompt",
        prior: -1.5,
        value: |v| flag(v.c.units == Units::All && v.g.positions.is_none_or(|p| p < PROMPT)),
    },
    GraphFeature { name: "glue", text: "it joins other graphs", prior: -1.5, value: |v| flag(v.g.glue) },
    GraphFeature {
        name: "fp16_decode",
        text: "uncompressed weights, and a call is no prompt",
        prior: 0.0,
        value: |v| {
            let mut all =
                v.g.weights.iter().filter(|w| w.bytes >= SMALL_CONSTANT || w.dims.is_empty()).peekable();
            let fp16 = all.peek().is_some() && all.all(|w| matches!(w.form, StoredForm::Dense(_)));
            flag(fp16 && v.g.positions.is_none_or(|p| p < PROMPT))
        },
    },
    GraphFeature {
        name: "chip",
        text: "generation of the chip (pairs of generations above M4)",
        prior: 0.0,
        value: |v| v.c.chip.map_or(0.0, |chip| f64::from(chip.generation() - 4) / 2.0),
    },
    GraphFeature {
        name: "system",
        text: "macOS 26, iOS 26 and later",
        prior: 0.0,
        value: |v| v.c.system.map_or(0.0, |s| if s.0 >= 26 { 0.5 } else { -0.5 }),
    },
];

/// Computes the values of all features of a function.
pub fn values(g: &Graph, c: &Conditions) -> Vec<f64> {
    let view = FunctionView::new(g, c);
    FEATURES.iter().map(|f| (f.value)(&view)).collect()
}

/// Names of the features that the machine alone decides.
const OF_MACHINE: [&str; 2] = ["chip", "system"];

/// Puts values that were computed elsewhere into the order of [`FEATURES`]. Missing values are 0, unknown names are
/// left out, and features of the machine follow from the conditions.
pub fn named_values(named: &[(String, f64)], c: &Conditions) -> Vec<f64> {
    let nothing = Graph::default();
    let machine = FunctionView::new(&nothing, c);
    let of = |f: &GraphFeature| match OF_MACHINE.contains(&f.name) {
        true => (f.value)(&machine),
        false => named.iter().find(|(name, _)| name == f.name).map_or(0.0, |(_, value)| *value),
    };
    FEATURES.iter().map(of).collect()
}

/// Returns the values of a program without those of the machine, by name.
pub fn program_values(g: &Graph) -> impl Iterator<Item = (&'static str, f64)> {
    let all = FEATURES.iter().zip(values(g, &Conditions::default()));
    all.filter(|(f, _)| !OF_MACHINE.contains(&f.name)).map(|(f, value)| (f.name, value))
}
