//! Choices choices that a seed decides.

/// Draws what trials choose.
#[derive(Clone, Debug)]
pub struct Choices(anemoe_io::Random);

impl Choices {
    /// A generator whose numbers depend on the seed alone.
    pub fn new(seed: u64) -> Choices {
        Choices(anemoe_io::Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below `n`; 0 where there is none.
    pub fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// An element of a list that is not empty.
    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    /// A number at which readers fail: a bound of a type, a power of two, or a neighbour of one.
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
