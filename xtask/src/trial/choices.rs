//! Random choices that a seed determines.

/// Generator of a trial's choices.
#[derive(Clone, Debug)]
pub struct Choices(anemoe_io::Random);

impl Choices {
    /// Makes a generator whose numbers depend on the seed alone.
    pub fn new(seed: u64) -> Choices {
        Choices(anemoe_io::Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d))
    }

    /// Draws 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// Draws a number below `n`; 0 for `n` = 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }

    /// Tells whether an event of probability `1 / n` happens.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Draws an element of a list that is not empty.
    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    /// Draws a number at which readers tend to fail: a bound of a type, a power of two, or a neighbour of one.
    pub fn edge(&mut self) -> u64 {
        let power = 1u64 << self.below(64);
        match self.below(8) {
            0 => 0,
            1 => u64::MAX - self.below(3) as u64,
            2 => i64::MAX as u64 + self.below(2) as u64,
            3 => u64::from(u32::MAX) - self.below(2) as u64,
            4 => power,
            5 => power - 1,
            6 => power + 1,
            _ => self.below(300) as u64,
        }
    }
}
