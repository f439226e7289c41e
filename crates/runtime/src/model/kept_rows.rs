//! Rows of the newest tokens of a sequence that functions take as inputs.
//!
//! ```text
//! call n      rows of earlier tokens  --input--> function --output--> rows of the call's own tokens
//! call n + 1  the newest of both      --input--> ...
//! ```

use crate::backend::KeptRows;
use crate::tensor::Tensor;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most tokens of a pass that can be undone one by one.
pub const MOST_UNDONE: usize = 31;

/// Kept rows of a sequence in one package, by the input that takes them.
pub(super) type RowsByInput = BTreeMap<String, NewestRows>;

/// Rows of a sequence's newest tokens, for one [`KeptRows`].
#[derive(Clone, Debug, Default)]
pub(super) struct NewestRows {
    /// Number of rows that a function takes.
    count: usize,
    /// Values of a token's row, all heads.
    width: usize,
    /// Rows of the newest tokens, newest last.
    rows: Vec<f32>,
    /// True if rows of older tokens were dropped, so that the rows before these are not zero.
    has_more: bool,
}

/// Fills the input of a call: the newest rows, with zeros before the first token.
pub(super) fn fill_rows(to: &mut Tensor, of_package: &RowsByInput, kept: &KeptRows) {
    let values = to.reset_f32(&[1, kept.heads, kept.count, kept.channels]);
    values.fill(0.0);
    let Some(newest) = of_package.get(&kept.input) else { return };
    let first = newest.tokens().saturating_sub(kept.count);
    let empty = kept.count - (newest.tokens() - first);
    for (i, row) in newest.rows.chunks_exact(newest.width.max(1)).skip(first).enumerate() {
        for (head, row) in row.chunks_exact(kept.channels).enumerate() {
            values[(head * kept.count + empty + i) * kept.channels..][..kept.channels].copy_from_slice(row);
        }
    }
}

/// Appends the rows of `tokens` from an output `[1, heads, T, channels]`.
pub(super) fn append_rows(
    of_package: &mut RowsByInput,
    kept: &KeptRows,
    output: &Tensor,
    tokens: Range<usize>,
) -> Result<()> {
    let wrong = || {
        let expected = format!("[1, {}, T, {}]", kept.heads, kept.channels);
        Error::input(format!("output `{}`: shape {:?}, expected {expected}", kept.rows, output.shape))
    };
    let (&[1, heads, width, channels], Some(values)) = (output.shape.as_slice(), output.as_f32()) else {
        return Err(wrong());
    };
    if (heads, channels) != (kept.heads, kept.channels) || tokens.end > width {
        return Err(wrong());
    }
    if !of_package.contains_key(&kept.input) {
        let rows = Vec::with_capacity(2 * (kept.count + MOST_UNDONE) * heads * channels);
        let newest = NewestRows { count: kept.count, width: heads * channels, rows, has_more: false };
        of_package.insert(kept.input.clone(), newest);
    }
    if let Some(newest) = of_package.get_mut(&kept.input) {
        for t in tokens {
            let row = (0..heads).map(|head| &values[(head * width + t) * channels..][..channels]);
            newest.push(row);
        }
    }
    Ok(())
}

impl NewestRows {
    /// Returns the most rows that are kept: as many that the newest tokens can be undone.
    fn most(&self) -> usize {
        self.count + MOST_UNDONE
    }

    fn tokens(&self) -> usize {
        self.rows.len() / self.width.max(1)
    }

    /// Appends the row of a token, by heads. The oldest rows go when there are twice as many as are kept.
    fn push<'a>(&mut self, row: impl Iterator<Item = &'a [f32]>) {
        if self.tokens() >= 2 * self.most() {
            self.rows.drain(..self.most() * self.width);
            self.has_more = true;
        }
        row.for_each(|row| self.rows.extend_from_slice(row));
    }

    /// Tells whether the last `tokens` tokens can be undone.
    pub fn can_rewind(&self, tokens: usize) -> bool {
        tokens + if self.has_more { self.count } else { 0 } <= self.tokens()
    }

    /// Undoes the last `tokens` tokens.
    pub fn rewind(&mut self, tokens: usize) {
        self.rows.truncate(self.tokens().saturating_sub(tokens) * self.width);
    }

    /// Fills the rows with noise, as if many tokens had been there; there are rows of at least one.
    pub fn fill_with_noise(&mut self, random: &mut anemoe_io::Random) {
        self.rows.resize_with(self.most() * self.width, || random.uniform() as f32 - 0.5);
        self.has_more = true;
    }

    /// Appends the rows to `out`, in a form that [`NewestRows::restore`] reads.
    pub fn save(&self, out: &mut Vec<u8>) {
        for n in [usize::from(self.has_more), self.count, self.tokens(), self.width] {
            out.extend((n as u64).to_le_bytes());
        }
        self.rows.iter().for_each(|v| out.extend(v.to_le_bytes()));
    }

    /// Takes rows from the front of `bytes`; none where the bytes end early or are impossible.
    pub fn restore(bytes: &mut &[u8]) -> Option<NewestRows> {
        let mut number = || usize::try_from(u64::from_le_bytes(bytes.split_off(..8)?.try_into().ok()?)).ok();
        let (has_more, count, tokens, width) = (number()?, number()?, number()?, number()?);
        if has_more > 1 || width == 0 {
            return None;
        }
        let values = bytes.split_off(..tokens.checked_mul(width)?.checked_mul(4)?)?;
        let rows = values.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let newest = NewestRows { count, width, rows, has_more: has_more == 1 };
        (tokens <= count.checked_add(MOST_UNDONE)?.checked_mul(2)?).then_some(newest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(count: usize) -> KeptRows {
        KeptRows { input: "i".into(), rows: "r".into(), count, heads: 2, channels: 3 }
    }

    fn input(rows: &RowsByInput, of: &KeptRows) -> Tensor {
        let mut tensor = Tensor::default();
        fill_rows(&mut tensor, rows, of);
        tensor
    }

    /// Makes an output for tokens `first..first + n` in a call of `width`; each value encodes head, token and channel.
    fn output(first: usize, n: usize, width: usize) -> Tensor {
        let value = |h: usize, t: usize, c: usize| match t < n {
            true => (100 * h + 10 * (first + t) + c) as f32,
            false => f32::NAN,
        };
        let values = (0..2).flat_map(|h| (0..width).flat_map(move |t| (0..3).map(move |c| value(h, t, c))));
        Tensor::f32(&[1, 2, width, 3], values.collect())
    }

    #[test]
    fn the_newest_rows_come_back_however_calls_are_cut() {
        let of = of(2);
        for cuts in [vec![5], vec![1, 4], vec![2, 1, 2], vec![1; 5], vec![4, 1]] {
            let (mut rows, mut at) = (RowsByInput::new(), 0);
            for n in cuts {
                append_rows(&mut rows, &of, &output(at, n, n + 2), 0..n).unwrap();
                at += n;
            }
            let want = [30, 31, 32, 40, 41, 42, 130, 131, 132, 140, 141, 142].map(|v| v as f32);
            assert_eq!(input(&rows, &of), Tensor::f32(&[1, 2, 2, 3], want.to_vec()));
        }
    }

    #[test]
    fn before_the_first_token_there_are_zeros() {
        let (of, mut rows) = (of(2), RowsByInput::new());
        assert_eq!(input(&rows, &of), Tensor::f32(&[1, 2, 2, 3], vec![0.0; 12]));
        append_rows(&mut rows, &of, &output(7, 1, 1), 0..1).unwrap();
        let want = [0, 0, 0, 70, 71, 72, 0, 0, 0, 170, 171, 172].map(|v| v as f32);
        assert_eq!(input(&rows, &of), Tensor::f32(&[1, 2, 2, 3], want.to_vec()));
    }

    #[test]
    fn the_newest_of_many_rows_can_be_undone() {
        let (of, mut rows) = (of(2), RowsByInput::new());
        append_rows(&mut rows, &of, &output(0, 50, 50), 0..50).unwrap();
        assert!(rows["i"].can_rewind(50), "no row was dropped");
        append_rows(&mut rows, &of, &output(50, 50, 50), 0..50).unwrap();
        let newest = rows.get_mut("i").unwrap();
        assert!(newest.has_more && newest.can_rewind(MOST_UNDONE) && !newest.can_rewind(66));
        newest.rewind(MOST_UNDONE);
        let want =
            [67, 68, 167, 168].map(|row| (0..3).map(move |c| (row / 100 * 100 + row % 100 * 10 + c) as f32));
        assert_eq!(input(&rows, &of).as_f32().unwrap(), want.into_iter().flatten().collect::<Vec<_>>());
        assert!(append_rows(&mut rows, &of, &output(0, 2, 2), 0..3).is_err());
    }

    #[test]
    fn saved_rows_come_back() {
        let (of, mut rows) = (of(2), RowsByInput::new());
        for n in [1, 4, 80] {
            append_rows(&mut rows, &of, &output(0, n, n), 0..n).unwrap();
            let mut bytes = Vec::new();
            rows["i"].save(&mut bytes);
            let back = NewestRows::restore(&mut bytes.as_slice()).unwrap();
            assert_eq!(format!("{back:?}"), format!("{:?}", rows["i"]));
            assert!((0..bytes.len()).all(|cut| NewestRows::restore(&mut &bytes[..cut]).is_none()));
        }
    }
}
