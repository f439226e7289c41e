//! Rebuilds rows that state their dimensions as real programs, so that rules see the same facts as in a package.

use super::super::graph::{Shapes, StoredForm};
use super::super::rule::PackageFacts;
use super::sketch::Sketch;
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, Var, model};
use anemoe_mlpackage::mil::{DataType, Opset, TensorType, Value};

/// Returns the facts of the program that a row describes; `None` where the row states too little, or something that
/// is not rebuilt.
pub fn facts(s: &Sketch) -> Option<PackageFacts> {
    if s.shapes != Shapes::Fixed
        || !s.named.is_empty()
        || s.activations
        || s.positions.len() > 1
        || !plain(&s.form)
    {
        return None;
    }
    let build = || -> Option<Result<FunctionBuilder>> {
        match (s.lone, s.extents.as_deref(), s.lone_product) {
            (Some("matmul"), Some(extents), _) => Some(product(s, extents)),
            (Some("scaled_dot_product_attention"), Some(&[b, h, n, d]), _) => {
                Some(attention(s, [b, h, n, d]))
            }
            (Some(op @ ("linear" | "conv")), _, Some((k, n))) => Some(lone(s, op, k, n)),
            (None, _, _) if s.gated_mlp => Some(mlp(s, s.width?, s.mlp?)),
            (None, _, _) if s.layered => Some(layers(s, s.width?, s.mlp?, s.heads?)),
            _ => None,
        }
    };
    let f = build()?.ok()?.finish().ok()?;
    let built = model(Opset::CoreML8, vec![("main".into(), f)], "main").ok()?;
    Some(super::super::analyze::facts(&built))
}

fn plain(form: &StoredForm) -> bool {
    match form {
        StoredForm::Dense(_) => true,
        StoredForm::Linear { grain, bits } => *grain != Granularity::Block && *bits == 8,
        StoredForm::Lut { scaled, vector, .. } => !scaled && *vector == 1,
        StoredForm::Sparse | StoredForm::Unstated => false,
    }
}

struct Maker<'a> {
    f: FunctionBuilder,
    s: &'a Sketch,
    /// Offset of the last blob. Only types are read, so blobs have no data.
    offset: u64,
}

impl Maker<'_> {
    fn new(s: &Sketch) -> Maker<'_> {
        Maker { f: FunctionBuilder::new(Opset::CoreML8), s, offset: 0 }
    }

    fn dtype(&self) -> DataType {
        if self.s.fp32 { DataType::Float32 } else { DataType::Float16 }
    }

    fn blob(&mut self, dtype: DataType, dims: &[u64]) -> Value {
        self.offset += 64;
        Value::blob(dtype, dims, self.offset)
    }

    /// Adds a matrix `[n, k]`, or the weight of a 1x1 convolution `[n, k, 1, 1]`, in the row's storage form.
    fn weight(&mut self, name: &str, n: u64, k: u64, conv: bool) -> Result<Var> {
        let mut dims = vec![n, k];
        let mut ones = vec![1, 1];
        if conv {
            dims.extend([1, 1]);
            ones.extend([1, 1]);
        }
        let dtype = self.dtype();
        match self.s.form.clone() {
            StoredForm::Linear { grain, .. } => {
                let data = self.blob(DataType::Int8, &dims);
                if grain == Granularity::Channel {
                    ones[0] = n;
                }
                let scale = self.blob(dtype, &ones);
                self.f.constexpr_blockwise_shift_scale(name, data, scale, None)
            }
            StoredForm::Lut { bits, grouped_axes, entries, .. } => {
                let indices = DataType::uint_of_bits(bits as usize).unwrap_or(DataType::UInt4);
                let indices = self.blob(indices, &dims);
                for axis in grouped_axes {
                    ones[axis] = if dims[axis].is_multiple_of(32) { dims[axis] / 32 } else { 1 };
                }
                ones.extend([1 << bits, 1]);
                let lut = self.blob(entries, &ones);
                self.f.constexpr_lut_to_dense(name, indices, lut)
            }
            _ => {
                let value = self.blob(dtype, &dims);
                self.f.constant(name, value)
            }
        }
    }

    fn conv(&mut self, name: &str, x: &Var, n: u64, k: u64) -> Result<Var> {
        let weight = self.weight(&format!("{name}_weight"), n, k, true)?;
        self.f.conv(name, x, &weight, None, ConvParams::default())
    }

    fn norm(&mut self, name: &str, x: &Var) -> Result<Var> {
        let square = self.f.mul(&format!("{name}_square"), x, x)?;
        let mean = self.f.reduce_mean(&format!("{name}_mean"), &square, &[1], true)?;
        let scale = self.f.rsqrt(&format!("{name}_rsqrt"), &mean, 1e-5)?;
        self.f.mul(name, x, &scale)
    }

    fn gated(&mut self, prefix: &str, x: &Var, d: u64, width: u64) -> Result<Var> {
        let gate = self.conv(&format!("{prefix}gate"), x, width, d)?;
        let up = self.conv(&format!("{prefix}up"), x, width, d)?;
        let silu = self.f.silu(&format!("{prefix}silu"), &gate)?;
        let product = self.f.mul(&format!("{prefix}product"), &silu, &up)?;
        self.conv(&format!("{prefix}down"), &product, d, width)
    }
}

fn tokens(s: &Sketch) -> u64 {
    s.positions.first().copied().unwrap_or(1)
}

fn lone(s: &Sketch, op: &str, k: u64, n: u64) -> Result<FunctionBuilder> {
    let mut m = Maker::new(s);
    let y = if op == "conv" {
        let x = m.f.input("x", TensorType::fixed(m.dtype(), &[1, k, 1, tokens(s)]))?;
        m.conv("y", &x, n, k)?
    } else {
        let x = m.f.input("x", TensorType::fixed(m.dtype(), &[tokens(s), k]))?;
        let weight = m.weight("w", n, k, false)?;
        m.f.linear("y", &x, &weight, None)?
    };
    m.f.output(&y)?;
    Ok(m.f)
}

fn product(s: &Sketch, extents: &[u64]) -> Result<FunctionBuilder> {
    let (rows, k) = (extents[0], extents.get(1).copied().unwrap_or(extents[0]));
    let cols = extents.get(2).copied().unwrap_or(k);
    let mut m = Maker::new(s);
    let x = m.f.input("x", TensorType::fixed(m.dtype(), &[rows, k]))?;
    let y = m.f.input("y", TensorType::fixed(m.dtype(), &[k, cols]))?;
    let z = m.f.matmul("z", &x, &y, false, false)?;
    m.f.output(&z)?;
    Ok(m.f)
}

fn attention(s: &Sketch, dims: [u64; 4]) -> Result<FunctionBuilder> {
    let mut m = Maker::new(s);
    let ty = TensorType::fixed(m.dtype(), &dims);
    let (q, k) = (m.f.input("q", ty.clone())?, m.f.input("k", ty.clone())?);
    let v = m.f.input("v", ty)?;
    let y = m.f.scaled_dot_product_attention("y", &q, &k, &v, None)?;
    m.f.output(&y)?;
    Ok(m.f)
}

fn mlp(s: &Sketch, d: u64, width: u64) -> Result<FunctionBuilder> {
    let mut m = Maker::new(s);
    let x = m.f.input("x", TensorType::fixed(m.dtype(), &[1, d, 1, tokens(s)]))?;
    let y = m.gated("", &x, d, width)?;
    m.f.output(&y)?;
    Ok(m.f)
}

/// Builds decoder layers with grouped-query attention over a cache, which is a state or an input.
fn layers(s: &Sketch, d: u64, width: u64, (heads, kv): (u64, u64)) -> Result<FunctionBuilder> {
    let t = tokens(s);
    let slots = s.slots.filter(|&n| (32..=1 << 20).contains(&n)).unwrap_or(512);
    let head_dim = s.head_dim.unwrap_or(d / heads.max(1)).max(1);
    let group = (heads / kv.max(1)).max(1);
    let mut m = Maker::new(s);
    let mut x = m.f.input("x", TensorType::fixed(m.dtype(), &[1, d, 1, t]))?;
    let count = s.layers.unwrap_or(1).min(256);
    let cache = TensorType::fixed(DataType::Float16, &[count, 2 * kv, slots, head_dim]);
    let cache = if s.states.is_empty() { m.f.input("cache", cache)? } else { m.f.state("cache", cache)? };
    let cached = if s.states.is_empty() { cache } else { m.f.read_state("cached", &cache)? };
    let ints = |v: &[u64]| v.iter().map(|&n| n as i32).collect::<Vec<i32>>();
    for i in 0..count {
        let p = format!("l{i}_");
        let name = |n: &str| format!("{p}{n}");
        let h = m.norm(&name("norm1"), &x)?;
        let q = m.conv(&name("q"), &h, heads * head_dim, d)?;
        let kv_new = m.conv(&name("kv"), &h, 2 * kv * head_dim, d)?;
        let q = m.f.reshape(&name("q4"), &q, &ints(&[1, kv, group * t, head_dim]))?;
        let kv_new = m.f.reshape(&name("kv4"), &kv_new, &ints(&[1, 2 * kv, t, head_dim]))?;
        let own = m.f.slice_by_size(
            &name("own"),
            &cached,
            &[i as i32, 0, 0, 0],
            &ints(&[1, 2 * kv, slots.saturating_sub(t), head_dim]),
        )?;
        let all = m.f.concat(&name("all"), &[&own, &kv_new], 2)?;
        let halves = m.f.split(&name("halves"), &all, 2, 1)?;
        let scores = m.f.matmul(&name("scores"), &q, &halves[0], false, true)?;
        let weights = m.f.softmax(&name("softmax"), &scores, -1)?;
        let mixed = m.f.matmul(&name("mixed"), &weights, &halves[1], false, false)?;
        let mixed = m.f.reshape(&name("mixed4"), &mixed, &ints(&[1, heads * head_dim, 1, t]))?;
        let o = m.conv(&name("o"), &mixed, d, heads * head_dim)?;
        let sum = m.f.add(&name("sum1"), &x, &o)?;
        let h = m.norm(&name("norm2"), &sum)?;
        let y = m.gated(&p, &h, d, width)?;
        x = m.f.add(&name("sum2"), &sum, &y)?;
    }
    m.f.output(&x)?;
    Ok(m.f)
}
