//! Loops over elements by strides, for plans and the op library.
//!
//! ```text
//! shape [2, 3], strides [1, 2], start 5:   5 7 9
//!                                          6 8 10
//! ```

use crate::tensor::{Data, Tensor};
use anemoe_kernels::{Pool, Strided};
use smallvec::{SmallVec, smallvec};

/// Elements that a thread computes in one part of a job.
const SPLIT: usize = 1 << 14;
/// Elements of a cache line.
const LINE: usize = 16;

/// Returns row-major strides, in elements.
pub(super) fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

/// Returns the strides of elements of `shape` broadcast to `wanted` as in NumPy: 0 along repeated axes. None where they do not
/// fit.
pub(super) fn broadcast_strides(shape: &[usize], strides: &[usize], wanted: &[usize]) -> Option<Vec<usize>> {
    let missing = wanted.len().checked_sub(shape.len())?;
    let mut result = vec![0; wanted.len()];
    for i in 0..shape.len() {
        match (shape[i], wanted[missing + i]) {
            (1, _) => {}
            (a, b) if a == b => result[missing + i] = strides[i],
            _ => return None,
        }
    }
    Some(result)
}

/// Loops over equally shaped operands. Dimensions of size 1 are left out, and dimensions are joined where all strides allow.
/// They are sorted so that the first operand is walked in order.
#[derive(Clone, Debug)]
pub(in crate::cpu) struct StridedLoops<const N: usize> {
    /// Outer loops.
    outer: Vec<(usize, [usize; N])>,
    inner: (usize, [usize; N]),
    start: [usize; N],
}

impl<const N: usize> StridedLoops<N> {
    pub fn new(shape: &[usize], strides: [&[usize]; N], start: [usize; N]) -> StridedLoops<N> {
        let mut dims: Vec<(usize, [usize; N])> = (0..shape.len())
            .filter(|&i| shape[i] != 1)
            .map(|i| (shape[i], std::array::from_fn(|k| strides[k][i])))
            .collect();
        dims.sort_by(|a, b| b.1[0].cmp(&a.1[0]));
        let mut joined: Vec<(usize, [usize; N])> = Vec::new();
        for d in dims {
            match joined.last_mut() {
                Some(last) if (0..N).all(|k| last.1[k] == d.1[k] * d.0) => *last = (last.0 * d.0, d.1),
                _ => joined.push(d),
            }
        }
        let inner = joined.pop().unwrap_or((1, [1; N]));
        let empty = shape.contains(&0);
        StridedLoops { outer: joined, inner: if empty { (0, inner.1) } else { inner }, start }
    }

    /// Calls `row` with the first place of each operand, the number of elements, and the step of each operand.
    #[inline]
    pub fn each(&self, mut row: impl FnMut([usize; N], usize, &[usize; N])) {
        let (n, strides) = (self.inner.0, &self.inner.1);
        if n == 0 {
            return;
        }
        match self.outer.as_slice() {
            [] => row(self.start, n, strides),
            [(m, s)] => {
                let mut at = self.start;
                for _ in 0..*m {
                    row(at, n, strides);
                    (0..N).for_each(|k| at[k] += s[k]);
                }
            }
            outer => {
                let mut count: SmallVec<[usize; 8]> = smallvec![0; outer.len()];
                let mut at = self.start;
                loop {
                    row(at, n, strides);
                    let mut d = outer.len();
                    loop {
                        if d == 0 {
                            return;
                        }
                        d -= 1;
                        count[d] += 1;
                        (0..N).for_each(|k| at[k] += outer[d].1[k]);
                        if count[d] < outer[d].0 {
                            break;
                        }
                        count[d] = 0;
                        (0..N).for_each(|k| at[k] -= outer[d].0 * outer[d].1[k]);
                    }
                }
            }
        }
    }

    /// Calls `element` with the places of each element in all operands, in the order of the first operand.
    pub fn each_element(&self, mut element: impl FnMut([usize; N])) {
        self.each(|at, n, strides| {
            (0..n).for_each(|k| element(std::array::from_fn(|i| at[i] + k * strides[i])));
        });
    }

    /// Calls `run` with these loops and `y`, which holds the first operand. With many elements, calls `run` with parts of both
    /// on several threads. Each place of the loops writes `row` elements.
    pub fn split(
        &self,
        pool: &Pool,
        y: &mut [f32],
        row: usize,
        run: &(dyn Fn(&StridedLoops<N>, &mut [f32]) + Sync),
    ) {
        self.split_by(pool, y, (row, row), run);
    }

    /// Splits loops like [`StridedLoops::split`]; each place of the loops reads `read` elements and writes
    /// `row` elements.
    pub fn split_by(
        &self,
        pool: &Pool,
        y: &mut [f32],
        (row, read): (usize, usize),
        run: &(dyn Fn(&StridedLoops<N>, &mut [f32]) + Sync),
    ) {
        if self.inner.0 == 0 || self.outer.iter().any(|(n, _)| *n == 0) {
            return;
        }
        let (count, strides) = self.outer.first().copied().unwrap_or(self.inner);
        let inner = if self.outer.is_empty() { None } else { Some(&self.inner) };
        let rest = self.outer.iter().skip(1).chain(inner);
        let (mut elements, mut extent) = (read, row);
        for (n, strides) in rest {
            elements *= n;
            extent += n.saturating_sub(1) * strides[0];
        }
        let at_a_time = (SPLIT / elements.max(1)).max(1);
        // Neighbouring results of a reduction share cache lines: a part takes whole lines.
        let at_a_time = if read > row { at_a_time.next_multiple_of(LINE) } else { at_a_time };
        if count <= at_a_time || extent == 0 || strides[0] < extent {
            return run(self, y);
        }
        let all = self.start[0]..self.start[0] + (count - 1) * strides[0] + extent;
        pool.for_chunks(&mut y[all], at_a_time * strides[0], &|i, y| {
            let first = i * at_a_time;
            let mut part = self.clone();
            let loops = part.outer.first_mut().unwrap_or(&mut part.inner);
            loops.0 = at_a_time.min(count - first);
            for k in 1..N {
                part.start[k] += first * strides[k];
            }
            part.start[0] = 0;
            run(&part, y);
        });
    }
}

/// A copy that transposes rows and columns.
pub(in crate::cpu) struct Exchange {
    /// Rows and columns of the result.
    pub sizes: (usize, usize),
    pub from: Strided,
    pub to: Strided,
}

impl StridedLoops<2> {
    /// Returns the first place of the second operand, if both operands are contiguous and the first begins at 0.
    pub fn contiguous(&self) -> Option<usize> {
        (self.outer.is_empty() && self.inner.1 == [1, 1] && self.start[0] == 0).then_some(self.start[1])
    }

    /// Returns the transpose that the loops describe, if they are one: columns lie together in the first operand,
    /// rows in the second.
    pub fn exchange(&self) -> Option<Exchange> {
        let &[(m, outer)] = self.outer.as_slice() else { return None };
        let (n, inner) = self.inner;
        if m < 2 || n < 2 {
            return None;
        }
        let (sizes, to, from) = if inner[0] == 1 && outer[1] == 1 && inner[1] > 1 && outer[0] >= n {
            ((m, n), outer[0], inner[1])
        } else if inner[1] == 1 && outer[0] == 1 && outer[1] > 1 && inner[0] >= m {
            ((n, m), inner[0], outer[1])
        } else {
            return None;
        };
        let strided = |k: usize, stride| Strided { first: self.start[k], stride };
        Some(Exchange { sizes, from: strided(1, from), to: strided(0, to) })
    }
}

/// Computes `out = f(x, y)` for each element.
#[inline(always)]
pub(super) fn zip_elements<A: Copy, B: Copy, R>(
    loops: &StridedLoops<3>,
    out: &mut [R],
    x: &[A],
    y: &[B],
    f: impl Fn(A, B) -> R,
) {
    loops.each(|[o, a, b], n, s| match s {
        [1, 1, 1] => {
            let (x, y) = (&x[a..a + n], &y[b..b + n]);
            out[o..o + n].iter_mut().zip(x.iter().zip(y)).for_each(|(o, (a, b))| *o = f(*a, *b));
        }
        [1, 1, 0] => {
            let y = y[b];
            out[o..o + n].iter_mut().zip(&x[a..a + n]).for_each(|(o, a)| *o = f(*a, y));
        }
        _ => (0..n).for_each(|i| out[o + i * s[0]] = f(x[a + i * s[1]], y[b + i * s[2]])),
    });
}

/// Copies elements of `x` to `out`, the first operand of `loops`.
pub(super) fn copy_elements<T: Copy>(loops: &StridedLoops<2>, x: &[T], out: &mut [T]) {
    loops.each(|[o, i], n, s| match s {
        [1, 1] => out[o..o + n].copy_from_slice(&x[i..i + n]),
        [1, 0] => out[o..o + n].fill(x[i]),
        _ => (0..n).for_each(|k| out[o + k * s[0]] = x[i + k * s[1]]),
    });
}

/// Copies floats on all threads; a transpose is copied in blocks.
pub(super) fn copy_floats(loops: &StridedLoops<2>, x: &[f32], out: &mut [f32]) {
    if let Some(e) = loops.exchange() {
        return anemoe_kernels::transpose(Pool::global(), e.sizes, (x, e.from), (out, e.to));
    }
    loops.split(Pool::global(), out, 1, &|loops, out| copy_elements(loops, x, out));
}

/// Copies elements of a tensor of any type to a tensor of `shape`; a tensor of strings is cloned as it is.
pub(super) fn copy_tensor_elements(loops: &StridedLoops<2>, x: &Tensor, shape: &[usize], out: &mut Tensor) {
    match &x.data {
        Data::F32(v) => copy_floats(loops, v, out.reset_f32(shape)),
        Data::I32(v) => copy_elements(loops, v, out.reset_i32(shape)),
        Data::Bool(v) => copy_elements(loops, v, out.reset_bool(shape)),
        Data::Str(_) => *out = x.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_loops_do_what_the_loops_do() {
        let pool = Pool::new(3);
        // Channels last, channels first, strided rows, rows that overlap, and no elements.
        for (shape, out) in [
            ([1, 70, 1, 900], [63000, 1, 70, 70]),
            ([1, 900, 1, 70], [63000, 70, 70, 1]),
            ([3, 300, 2, 50], [31000, 100, 50, 1]),
            ([2, 300, 3, 50], [15000, 50, 0, 1]),
            ([1, 20000, 1, 0], [1, 1, 1, 1]),
        ] {
            let loops = StridedLoops::new(&shape, [&out, &dense_strides(&shape)], [7, 0]);
            let write = |loops: &StridedLoops<2>, y: &mut [f32]| {
                loops.each(|[o, a], n, s| (0..n).for_each(|k| y[o + k * s[0]] = (a + k * s[1]) as f32));
            };
            let last = (0..4).map(|d| shape[d].saturating_sub(1) * out[d]).sum::<usize>();
            let size = if shape.contains(&0) { 0 } else { 7 + last + 1 };
            let (mut whole, mut pieces) = (vec![-1f32; size], vec![-1f32; size]);
            write(&loops, &mut whole);
            loops.split(&pool, &mut pieces, 1, &write);
            assert_eq!(whole, pieces, "{shape:?}");
        }
    }

    #[test]
    fn loops_visit_every_element_once() {
        // A tensor `[2, 3, 1, 4]` with its axes in the order 3, 2, 0, 1.
        let (shape, strides) = ([4, 1, 2, 3], [1, 4, 12, 4]);
        let out = dense_strides(&shape);
        let mut seen = [usize::MAX; 24];
        let mut see = |[o, x]: [usize; 2]| seen[o] = x;
        StridedLoops::new(&shape, [&out, &strides], [0, 0]).each_element(&mut see);
        assert!((0..24).all(|i| seen[i] == i / 6 + i / 3 % 2 * 12 + i % 3 * 4), "{seen:?}");
        let mut rows = 0;
        StridedLoops::new(&[5, 7], [&[7, 1], &[7, 1]], [0, 0]).each(|_, n, _| rows += n);
        assert_eq!(rows, 35);
        StridedLoops::new(&[5, 0], [&[0, 1]], [0]).each(|_, _, _| panic!("nothing to visit"));
    }

    #[test]
    fn loops_are_as_deep_as_their_shape() {
        let shape = [2; 20];
        let strides: Vec<usize> = dense_strides(&shape).into_iter().rev().collect();
        let mut seen = vec![false; 1 << 20];
        let loops = StridedLoops::new(&shape, [&dense_strides(&shape), &strides], [0, 0]);
        loops.each_element(|[o, x]| seen[o] = x == o.reverse_bits() >> (usize::BITS - 20));
        assert!(seen.iter().all(|s| *s));
    }
}
