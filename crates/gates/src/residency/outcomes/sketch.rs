//! Facts of a graph that a row of a table states, and the graph that rules take.

use super::super::graph::{Contraction, Graph, GraphState, GraphWeight, LAYER_OPS, Op, Shapes, StoredForm};
use anemoe_mlpackage::mil::{DataType, TensorType};

/// Known facts of a measured graph; open where the row does not state them.
#[derive(Clone, Debug, PartialEq)]
pub struct Sketch {
    /// Storage form of the matrices.
    pub form: StoredForm,
    /// True if all floats are wider than fp16.
    pub fp32: bool,
    /// True if activations are quantized.
    pub activations: bool,
    /// Bytes of weights.
    pub bytes: Option<u64>,
    /// Token counts, ascending; a package of two functions has two.
    pub positions: Vec<u64>,
    /// Shapes of the inputs.
    pub shapes: Shapes,
    /// States of the graph.
    pub states: Vec<GraphState>,
    /// Named op types that rules look for.
    pub named: Vec<String>,
    /// Number of ops, where it is stated.
    pub op_count: Option<u64>,
    /// Number of layers, where it is stated.
    pub layers: Option<u64>,
    /// Op type of a graph that is only one product: `linear`, `conv`, `matmul`, `scaled_dot_product_attention`.
    pub lone: Option<&'static str>,
    /// Depth and outputs of the lone product.
    pub lone_product: Option<(u64, u64)>,
    /// Depths of products that are stated.
    pub depths: Vec<u64>,
    /// Extents of a product of two computed matrices, or of an attention.
    pub extents: Option<Vec<u64>>,
    /// Hidden size in channels.
    pub width: Option<u64>,
    /// Width of the MLP in channels.
    pub mlp: Option<u64>,
    /// Numbers of query heads and key/value heads.
    pub heads: Option<(u64, u64)>,
    /// Width of a head in channels.
    pub head_dim: Option<u64>,
    /// Number of slots of the cache.
    pub slots: Option<u64>,
    /// True if the graph is only a gated MLP.
    pub gated_mlp: bool,
    /// True if the graph has the ops of a layer around its products.
    pub layered: bool,
    /// True if the graph joins other graphs.
    pub glue: bool,
    /// True if the graph holds the projection to a vocabulary.
    pub head: bool,
    /// True if inputs of products have two dimensions.
    pub rank_2: bool,
    /// True if positions lie on the first axis, each with an image of one pixel.
    pub batch_over_pixels: bool,
    /// True if products are convolutions.
    pub conv: bool,
    /// True if shapes or positions are known only at run time.
    pub runtime_bound: bool,
}

impl Sketch {
    /// Makes a graph of the known facts.
    pub fn graph(&self) -> Graph {
        let mut g = Graph {
            function: "main".into(),
            weight_bytes: self.bytes,
            positions: self.positions.first().copied(),
            layers: self.layers,
            shapes: self.shapes,
            states: self.states.clone(),
            vocabulary_head: self.head,
            glue: self.glue,
            ..Graph::default()
        };
        g.weights.push(GraphWeight {
            name: "weights".into(),
            dims: vec![],
            form: self.form.clone(),
            bytes: self.bytes.unwrap_or(0),
        });
        let op_type = self.lone.unwrap_or(if self.conv { "conv" } else { "linear" });
        let has_matrices =
            self.bytes.is_some() || self.lone.is_some() || !self.depths.is_empty() || self.layered;
        if has_matrices {
            let depths: Vec<Option<u64>> = if self.depths.is_empty() {
                vec![None]
            } else {
                self.depths.iter().copied().map(Some).collect()
            };
            for depth in depths {
                g.ops.push(self.matrix(op_type, depth));
            }
        }
        for name in &self.named {
            let wide = self.lone_product.map(|a| a.1).or(self.head.then_some(1 << 15));
            let axis_extent = matches!(name.as_str(), "topk" | "reduce_argmax").then_some(wide).flatten();
            g.ops.push(Op { name: name.clone(), op_type: name.clone(), axis_extent, ..Op::default() });
        }
        if self.activations {
            g.ops.push(Op { name: "quantize".into(), op_type: "quantize".into(), ..Op::default() });
        }
        // A row does not name all ops: a graph that is called a layer has the ops of a layer.
        let stated = self.op_count.or(self.layered.then(|| LAYER_OPS * self.layers.unwrap_or(1).max(1)));
        let named = g.ops.len() as u64;
        g.op_count =
            stated.or((self.lone.is_some() || self.gated_mlp).then_some(named)).map(|n| n.max(named));
        g
    }

    fn matrix(&self, op_type: &str, depth: Option<u64>) -> Op {
        let dtype = if self.fp32 { DataType::Float32 } else { DataType::Float16 };
        let mut inputs = Vec::new();
        if self.rank_2 {
            inputs.push(TensorType::fixed(dtype, &[1, self.width.unwrap_or(1024)]));
        } else if self.batch_over_pixels {
            inputs.push(TensorType::fixed(dtype, &[64, self.width.unwrap_or(640), 1, 1]));
        } else if self.fp32 {
            inputs.push(TensorType::fixed(dtype, &[1, 1, self.width.unwrap_or(1024)]));
        }
        let contraction = Contraction {
            depth,
            outputs: self.lone_product.map(|a| a.1),
            positions: self.positions.first().copied(),
            groups: 1,
            ..Contraction::default()
        };
        Op {
            name: "matrices".into(),
            op_type: op_type.into(),
            inputs,
            weights: vec![0],
            contraction: Some(contraction),
            runtime_bounds: if self.runtime_bound { vec!["bounds".into()] } else { vec![] },
            ..Op::default()
        }
    }
}
