//! Nodes of matmuls with weights.

use super::super::super::convolution::Convolution;
use super::super::super::ir::{Projection, ValueRef};
use super::super::super::weights::StoredWeight;
use super::super::nodes::{Computation, Fill, Item, Node, NodeKind, Then};
use super::super::view::{Base, View};
use super::plan_builder::{PlanBuilder, buffer_of, order_ending};
use anemoe_kernels::Window;
use std::sync::Arc;

impl PlanBuilder<'_> {
    pub(super) fn project(
        &mut self,
        projection: &Projection,
        x: ValueRef,
        bias: Option<ValueRef>,
    ) -> Option<()> {
        let x = self.float(x)?;
        match projection {
            Projection::Conv(conv) => {
                let (window, expected) = conv.over(&x.shape).ok()?;
                let (value, shape) = self.result()?;
                if expected != shape {
                    return None;
                }
                let bias = self.bias(bias, shape[1])?;
                // It is a matmul over tokens if its kernel has size 1, it has one group, and there is no image of two axes.
                if conv.matmul_groups() == Some(1) && conv.packed(&window).is_none() {
                    return self.tokenwise(x, conv.weight.clone(), bias, (1, 1), false);
                }
                let x = if conv.wants_channels_last(&window) { self.make_contiguous(x, 1) } else { x };
                let out = self.allocate(&shape, &order_ending(shape.len(), 1));
                self.convolve((conv.clone(), window), x, bias, &out, value);
                self.define(out)
            }
            Projection::Linear { weight, input, output } => {
                let axes = (x.rank().checked_sub(*input)?, x.rank().checked_sub(*output)?);
                let bias = self.bias(bias, weight.rows())?;
                let tokens = x.len() / weight.cols().max(1);
                let packs = *output == 1 && weight.packs_for(tokens);
                self.tokenwise(x, weight.clone(), bias, axes, packs)
            }
        }
    }

    /// Adds a node of a convolution whose results are `value`, a buffer of the instructions.
    fn convolve(
        &mut self,
        (conv, window): (Arc<Convolution>, Window),
        x: View,
        bias: Option<Base>,
        out: &View,
        value: usize,
    ) {
        let then = if self.rounds_result() { vec![Then::Round] } else { Vec::new() };
        let work = Computation::Conv { conv, window, x, bias, then };
        self.push(NodeKind::Compute(work, buffer_of(out)));
        self.convs.push((self.nodes.len() - 1, value));
    }

    /// Returns the place of a bias of `rows` elements; `Some(None)` where there is no bias, `None` where it does not fit.
    fn bias(&mut self, bias: Option<ValueRef>, rows: usize) -> Option<Option<Base>> {
        let Some(bias) = bias else { return Some(None) };
        let v = self.float(bias)?;
        (v.len() == rows && v.is_dense() && v.offset == 0).then_some(Some(v.base))
    }

    /// Adds a matmul over the tokens of `x`. `axis` holds the channels of `x`, `to_axis` the channels of the result. `packs` says
    /// that the rows of the weight are packed for many tokens.
    fn tokenwise(
        &mut self,
        x: View,
        weight: Arc<StoredWeight>,
        bias: Option<Base>,
        (axis, to_axis): (usize, usize),
        packs: bool,
    ) -> Option<()> {
        let (value, shape) = self.result()?;
        let (rank, rows, cols) = (x.rank(), weight.rows(), weight.cols());
        if x.shape.get(axis) != Some(&cols) {
            return None;
        }
        let view = self.make_contiguous(x, axis);
        // All dimensions except the channels become one.
        let others: Vec<usize> = (0..rank).filter(|&d| d != axis).collect();
        let tokens_view = view.transposed(&others.iter().copied().chain([axis]).collect::<Vec<_>>());
        let tokens: usize = tokens_view.shape[..rank - 1].iter().product();
        let flattened = self.reshaped(&tokens_view, &[tokens, cols])?;
        let dense: Vec<usize> = others.iter().map(|&d| view.shape[d]).chain([rows]).collect();
        let mut perm: Vec<usize> = (0..rank - 1).collect();
        perm.insert(to_axis, rank - 1);
        let out = self.allocate_dense(&dense);
        let result = out.transposed(&perm);
        if result.shape != shape {
            return None;
        }
        if packs {
            let conv = Arc::new(Convolution::of_linear(weight, true));
            let (window, _) = conv.over(&[1, cols, tokens]).ok()?;
            let (shape, strides) =
                (vec![1, cols, tokens], vec![0, flattened.strides[1], flattened.strides[0]]);
            let x = View { shape, strides, ..flattened };
            self.convolve((conv, window), x, bias, &out, value);
        } else {
            self.add_matmul(flattened, tokens, weight, bias, buffer_of(&out))?;
        }
        self.define(result)
    }

    /// Adds a matmul of `x`, `[tokens, channels]`, to the node of earlier matmuls of `x`, or to a new node.
    fn add_matmul(
        &mut self,
        x: View,
        tokens: usize,
        weight: Arc<StoredWeight>,
        bias: Option<Base>,
        out: usize,
    ) -> Option<()> {
        let (channels, strides) = (x.shape[1], (x.strides[0], x.strides[1]));
        let layout = weight.matrix().layout();
        let known = self.matmuls.iter().find(|(v, _, _)| *v == x).map(|(_, node, _)| *node);
        if let Some(node) = known
            && let Some(Node { work: NodeKind::MatMuls { fills, items }, .. }) = self.nodes.get_mut(node)
        {
            let same = fills.iter().find(|fill| fill.layout == layout).map(|fill| fill.packed);
            let packed = same.unwrap_or(self.packed);
            if same.is_none() {
                self.packed += 1;
                fills.push(Fill { packed, layout, x, tokens, channels, strides });
            }
            items.push(Item { weight, packed, out, bias });
            self.round_result(node, out);
            return Some(());
        }
        let packed = self.packed;
        self.packed += 1;
        self.matmuls.push((x.clone(), self.nodes.len(), packed));
        let fills = vec![Fill { packed, layout, x, tokens, channels, strides }];
        self.push(NodeKind::MatMuls { fills, items: vec![Item { weight, packed, out, bias }] });
        self.round_result(self.nodes.len() - 1, out);
        Some(())
    }
}
