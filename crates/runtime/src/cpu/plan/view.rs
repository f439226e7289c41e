//! Views: the places of a value's elements, by an offset and a stride for each dimension.

use anemoe_kernels::{Pool, Strided};

/// Elements that a thread takes at a time, where threads share loops.
const SPLIT: usize = 1 << 14;
/// Elements of a line of a cache.
const LINE: usize = 16;

/// Storage of a view's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Base {
    /// A buffer of the plan.
    Buffer(usize),
    /// A result of a kernel of the op library.
    Tensor(usize),
    /// A constant.
    Constant(usize),
    /// An input of the function, where the caller has it.
    Input(usize),
    /// A state.
    State(usize),
}

/// Elements of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub base: Base,
    pub offset: usize,
    pub shape: Vec<usize>,
    /// Strides of the dimensions, in elements.
    pub strides: Vec<usize>,
}

pub(super) fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

impl View {
    /// Row-major.
    pub fn dense(base: Base, shape: &[usize]) -> View {
        View { base, offset: 0, shape: shape.to_vec(), strides: dense_strides(shape) }
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Row-major from its offset on.
    pub fn is_dense(&self) -> bool {
        let dense = dense_strides(&self.shape);
        (0..self.rank()).all(|i| self.shape[i] == 1 || self.strides[i] == dense[i])
    }

    pub fn transposed(&self, perm: &[usize]) -> View {
        let turn = |v: &[usize]| perm.iter().map(|&p| v[p]).collect();
        View { shape: turn(&self.shape), strides: turn(&self.strides), ..*self }
    }

    /// `size` elements of `axis` from `begin` on.
    pub fn sliced(&self, axis: usize, begin: usize, size: usize) -> View {
        let mut v = self.clone();
        v.offset += begin * v.strides[axis];
        v.shape[axis] = size;
        v
    }

    /// The same elements in the same order under another shape, if strides can say so.
    pub fn reshaped(&self, shape: &[usize]) -> Option<View> {
        if self.len() != shape.iter().product::<usize>() || self.len() == 0 {
            return None;
        }
        let old: Vec<(usize, usize)> =
            self.shape.iter().zip(&self.strides).filter(|(n, _)| **n != 1).map(|(n, s)| (*n, *s)).collect();
        let mut strides = vec![0; shape.len()];
        let (mut i, mut j) = (0, 0);
        while i < old.len() {
            // A run of old dimensions with the elements of a run of new ones.
            let (mut a, mut b) = (old[i].0, 1);
            let (first_i, first_j) = (i, j);
            i += 1;
            loop {
                if b < a {
                    b *= *shape.get(j)?;
                    j += 1;
                } else if a < b {
                    let (n, s) = *old.get(i)?;
                    if old[i - 1].1 != s * n {
                        return None;
                    }
                    a *= n;
                    i += 1;
                } else {
                    break;
                }
            }
            let mut stride = old[i - 1].1;
            for k in (first_j..j).rev() {
                strides[k] = stride;
                stride *= shape[k];
            }
            // Between the dimensions of a run that was not joined above.
            if (first_i + 1..i).any(|k| old[k - 1].1 != old[k].1 * old[k].0) {
                return None;
            }
        }
        (shape[j.min(shape.len())..].iter().all(|&n| n == 1)).then(|| View {
            shape: shape.to_vec(),
            strides,
            ..*self
        })
    }

    /// Strides for a larger shape, with NumPy's broadcasting.
    pub fn broadcast(&self, shape: &[usize]) -> Option<Vec<usize>> {
        let missing = shape.len().checked_sub(self.rank())?;
        let mut strides = vec![0; shape.len()];
        for i in 0..self.rank() {
            match (self.shape[i], shape[missing + i]) {
                (1, _) => {}
                (a, b) if a == b => strides[missing + i] = self.strides[i],
                _ => return None,
            }
        }
        Some(strides)
    }
}

/// Loops over equally shaped operands: dimensions of size 1 left out, joined where all strides allow, sorted so that the
/// first operand is walked in order.
#[derive(Clone, Debug)]
pub(super) struct StridedLoops<const N: usize> {
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

    /// Calls `row` with the first place of each operand, the number of elements and the step of each.
    #[inline]
    pub fn each(&self, mut row: impl FnMut([usize; N], usize, &[usize; N])) {
        let (n, steps) = (self.inner.0, &self.inner.1);
        if n == 0 {
            return;
        }
        match self.outer.as_slice() {
            [] => row(self.start, n, steps),
            [(m, s)] => {
                let mut at = self.start;
                for _ in 0..*m {
                    row(at, n, steps);
                    (0..N).for_each(|k| at[k] += s[k]);
                }
            }
            outer => {
                let mut count = [0usize; 16];
                let mut at = self.start;
                loop {
                    row(at, n, steps);
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

    /// Calls `run` with these loops and `y`, whose elements are the first operand's, or with pieces of both on several threads
    /// where there are many elements; `row` elements are written from each place on.
    pub fn split(
        &self,
        pool: &Pool,
        y: &mut [f32],
        row: usize,
        run: &(dyn Fn(&StridedLoops<N>, &mut [f32]) + Sync),
    ) {
        self.split_by(pool, y, (row, row), run);
    }

    /// Splits loops like [`StridedLoops::split`]; for each place `read` elements are read and `row` are
    /// written.
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
        let (count, steps) = self.outer.first().copied().unwrap_or(self.inner);
        let inner = if self.outer.is_empty() { None } else { Some(&self.inner) };
        let rest = self.outer.iter().skip(1).chain(inner);
        let (mut elements, mut extent) = (read, row);
        for (n, steps) in rest {
            elements *= n;
            extent += n.saturating_sub(1) * steps[0];
        }
        let at_a_time = (SPLIT / elements.max(1)).max(1);
        // Of what is added up, places that lie together share lines.
        let at_a_time = if read > row { at_a_time.next_multiple_of(LINE) } else { at_a_time };
        if count <= at_a_time || extent == 0 || steps[0] < extent {
            return run(self, y);
        }
        let all = self.start[0]..self.start[0] + (count - 1) * steps[0] + extent;
        pool.for_chunks(&mut y[all], at_a_time * steps[0], &|i, y| {
            let first = i * at_a_time;
            let mut part = self.clone();
            let loops = part.outer.first_mut().unwrap_or(&mut part.inner);
            loops.0 = at_a_time.min(count - first);
            for k in 1..N {
                part.start[k] += first * steps[k];
            }
            part.start[0] = 0;
            run(&part, y);
        });
    }

    /// More loops than [`StridedLoops::each`] has counters for.
    pub fn is_too_deep(&self) -> bool {
        self.outer.len() > 16
    }
}

/// A copy that exchanges rows and columns.
pub(super) struct Exchange {
    /// Rows and columns of what is written.
    pub sizes: (usize, usize),
    pub from: Strided,
    pub to: Strided,
}

impl StridedLoops<2> {
    /// Gives the exchange of rows and columns, where the nest is one: the columns of the first operand lie
    /// together, and the rows of the second.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn at(v: &View, mut i: usize) -> usize {
        let mut place = v.offset;
        for d in (0..v.rank()).rev() {
            place += i % v.shape[d] * v.strides[d];
            i /= v.shape[d];
        }
        place
    }

    #[test]
    fn pieces_of_loops_do_what_the_loops_do() {
        let pool = Pool::new(3);
        // Tokens with channels together, the other way round, and one whose tokens are in each other's way.
        for (shape, out) in [
            ([1, 70, 1, 900], [63000, 1, 70, 70]),
            ([1, 900, 1, 70], [63000, 70, 70, 1]),
            ([3, 300, 2, 50], [31000, 100, 50, 1]),
            ([2, 300, 3, 50], [15000, 50, 0, 1]),
            ([1, 20000, 1, 0], [1, 1, 1, 1]),
        ] {
            let x = View::dense(Base::Buffer(0), &shape);
            let nest = StridedLoops::new(&shape, [&out, &x.strides], [7, 0]);
            let write = |nest: &StridedLoops<2>, y: &mut [f32]| {
                nest.each(|[o, a], n, s| (0..n).for_each(|k| y[o + k * s[0]] = (a + k * s[1]) as f32));
            };
            let last = (0..4).map(|d| shape[d].saturating_sub(1) * out[d]).sum::<usize>();
            let size = if shape.contains(&0) { 0 } else { 7 + last + 1 };
            let (mut whole, mut pieces) = (vec![-1f32; size], vec![-1f32; size]);
            write(&nest, &mut whole);
            nest.split(&pool, &mut pieces, 1, &write);
            assert_eq!(whole, pieces, "{shape:?}");
        }
    }

    #[test]
    fn reshaping_keeps_the_order_or_is_refused() {
        let base = View::dense(Base::Buffer(0), &[2, 3, 4, 5]);
        let views = [
            base.clone(),
            base.transposed(&[0, 1, 3, 2]),
            base.transposed(&[3, 0, 1, 2]),
            base.sliced(1, 1, 2),
            base.sliced(3, 0, 1),
            base.sliced(0, 1, 1).transposed(&[1, 0, 2, 3]),
        ];
        let shapes: [&[usize]; 9] = [
            &[120],
            &[2, 3, 20],
            &[6, 20],
            &[2, 12, 5],
            &[5, 24],
            &[2, 2, 20],
            &[40, 2],
            &[1, 24, 1],
            &[3, 4, 5, 1],
        ];
        let mut possible = 0;
        for v in &views {
            for shape in shapes {
                if let Some(r) = v.reshaped(shape) {
                    possible += 1;
                    assert!((0..v.len()).all(|i| at(v, i) == at(&r, i)), "{v:?} {shape:?}");
                }
            }
        }
        assert_eq!(base.reshaped(&[2, 12, 5]).map(|v| v.strides), Some(vec![60, 5, 1]));
        assert_eq!(base.transposed(&[0, 1, 3, 2]).reshaped(&[120]), None);
        assert!(possible >= 8, "{possible}");
    }

    #[test]
    fn loops_visit_every_element_once() {
        let v = View::dense(Base::Buffer(0), &[2, 3, 1, 4]);
        let turned = v.transposed(&[3, 2, 0, 1]);
        let out = dense_strides(&turned.shape);
        let nest = StridedLoops::new(&turned.shape, [&out, &turned.strides], [0, 0]);
        let mut seen = [usize::MAX; 24];
        nest.each(|[o, x], n, s| (0..n).for_each(|i| seen[o + i * s[0]] = x + i * s[1]));
        assert!((0..24).all(|i| seen[i] == at(&turned, i)));
        let mut rows = 0;
        StridedLoops::new(&[5, 7], [&[7, 1], &[7, 1]], [0, 0]).each(|_, n, _| rows += n);
        assert_eq!(rows, 35);
        StridedLoops::new(&[5, 0], [&[0, 1]], [0]).each(|_, _, _| panic!("nothing to visit"));
    }
}
