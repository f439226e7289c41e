//! Weight distributions that the quantizers are tested on.

use anemoe_io::Random;

/// Number of distributions of [`weights`].
pub const KINDS: usize = 8;

/// Makes `n` weights of distribution `kind`, from 0: gaussian, with outliers, heavy tails, few distinct values,
/// denormals of fp16, two far clusters, a grid, constant.
pub fn weights(seed: u64, n: usize, kind: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut uniform = move || random.uniform().max(1e-9);
    (0..n)
        .map(|_| {
            let gauss = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
            (match kind {
                0 => 0.02 * gauss,
                1 => 0.02 * gauss * if uniform() < 0.001 { 10.0 } else { 1.0 },
                2 => 0.01 * gauss / uniform().sqrt(),
                3 => (gauss * 3.0).round() * 0.01,
                4 => gauss * 1e-6,
                5 => 0.001 * gauss + if uniform() < 0.5 { 1.0 } else { -1.0 },
                6 => (uniform() * 1000.0).round() * 0.125,
                _ => 0.37,
            }) as f32
        })
        .collect()
}
