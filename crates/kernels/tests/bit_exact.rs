//! Checks digests of results: AVX2, AVX-512 and NEON give the same bits on every machine.
//!
//! Change a digest only where the order of sums changes on purpose; the test prints the new one.

#[path = "../src/test_data.rs"]
mod test_data;

use anemoe_kernels::{
    ActivationFunction, AttentionShape, CacheValues, CacheView, Columns, HeadStrides, Int8Lut, Int16Lut, Isa,
    MatMul, Matrix, PackedActivations, Pool, RmsNorm, apply_gate, attention, matmul_batch_on, rms_norm,
    round_to_int16, softcap,
};
use test_data::{bytes, noise};

/// Returns the FNV-1a digest of the numbers' bytes.
fn digest(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Multiplies a matrix by 1 token, then by 21. Returns the concatenated results.
fn multiply(isa: Isa, w: &Matrix<'_>) -> Vec<f32> {
    let mut all = Vec::new();
    for tokens in [1, 21] {
        let x = noise(20, tokens * w.cols());
        let mut packed = PackedActivations::default();
        let at = Columns { values: &x, first: 0, token_stride: w.cols(), channel_stride: 1 };
        packed.pack(&Pool::new(1), w.layout(), at, tokens, w.cols());
        let mut y = vec![0f32; tokens * w.rows()];
        let one = MatMul { w: *w, x: &packed, tokens: None, y: &mut y, stride: w.rows(), bias: None };
        matmul_batch_on(isa, &Pool::new(1), &mut [Some(one)]);
        all.append(&mut y);
    }
    all
}

#[test]
fn matmul_has_these_bits() {
    // Scalar code rounds products before it adds them, and packs activations differently.
    if Isa::best() == Isa::Scalar {
        return;
    }
    let (rows, cols) = (7, 800);
    let n = rows * cols;
    let dense = noise(1, n);
    let halves: Vec<u8> = dense.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
    let stored = bytes(2, n);
    let tables = noise(3, rows << 8);
    let (scale, offset) = (noise(4, rows * cols / 32), noise(5, rows * cols / 32));
    let codes = [1, 2, 3, 4, 6, 8].map(|bits| Int8Lut::new(&tables[..rows << bits], bits).unwrap());
    let lut = |bits: usize| {
        Matrix::lut(bits, &stored[..n * bits / 8], &tables[..rows << bits], 1, rows, cols).unwrap()
    };
    let mut rounded = tables[..rows << 4].to_vec();
    rounded.chunks_mut(16).for_each(round_to_int16);
    let words = Int16Lut::new(&rounded).unwrap();
    let in_words =
        Matrix::lut(4, &stored[..n / 2], &rounded, 1, rows, cols).unwrap().with_int16_lut(Some(&words));
    let int = |bits: usize, signed, block: usize| {
        let blocks = rows * cols / block;
        let (scale, offset) = (&scale[..blocks], &offset[..blocks]);
        Matrix::int(bits, signed, &stored[..n * bits / 8], scale, Some(offset), (1, block), rows, cols)
            .unwrap()
    };
    let expected: [(&str, Matrix<'_>, u64); 21] = [
        ("f32", Matrix::f32(&dense, rows, cols).unwrap(), 0x5087_a996_90ad_67e3),
        ("f16", Matrix::f16(&halves, rows, cols).unwrap(), 0x9f1e_f3bc_dc36_7672),
        ("lut1", lut(1), 0xa66c_eaae_bc4e_c310),
        ("lut2", lut(2), 0x4354_873b_4036_2f8c),
        ("lut3", lut(3), 0x89da_9b1a_c80b_88b2),
        ("lut4", lut(4), 0xb8b2_ae66_5d73_a6f4),
        ("lut4 int16", in_words, 0x0e2e_c51a_a628_c355),
        ("lut6", lut(6), 0x7c79_018e_473b_7a9f),
        ("lut8", lut(8), 0xcf29_75ab_a9f0_15bc),
        ("int4", int(4, true, 32), 0x3b20_3ce3_1971_d75f),
        ("int8", int(8, true, 32), 0xbd02_21a4_357f_bbc0),
        ("uint8", int(8, false, cols), 0x61df_a3e0_f105_5ced),
        ("fast lut1", lut(1).with_fast(Some(&codes[0])), 0x2f26_cdbf_4fb7_be99),
        ("fast lut2", lut(2).with_fast(Some(&codes[1])), 0x9698_1bfa_7910_40b2),
        ("fast lut3", lut(3).with_fast(Some(&codes[2])), 0xa115_0460_a402_2f2c),
        ("fast lut4", lut(4).with_fast(Some(&codes[3])), 0x5132_fa67_e95f_2853),
        ("fast lut6", lut(6).with_fast(Some(&codes[4])), 0x78c0_00de_56b6_bcd8),
        ("fast lut8", lut(8).with_fast(Some(&codes[5])), 0xa9c8_10ea_3965_0f36),
        ("fast int4", int(4, true, cols).with_fast(None), 0x0d7d_fa36_5734_1307),
        ("fast int8", int(8, true, cols).with_fast(None), 0xd4d8_c4d8_9d1c_1d2a),
        ("fast uint8", int(8, false, cols).with_fast(None), 0x01cd_e106_b067_f301),
    ];
    let mut wrong = Vec::new();
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        for (kind, w, expected) in &expected {
            let found = digest(&multiply(isa, w));
            if found != *expected {
                wrong.push(format!("{isa:?} {kind}: {found:#018x}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn vector_functions_have_these_bits() {
    if Isa::best() == Isa::Scalar {
        return;
    }
    let x: Vec<f32> = noise(6, 1003).into_iter().map(|v| v * 20.0).collect();
    let mut wrong = Vec::new();
    let mut check = |what: &str, values: &[f32], expected: u64| {
        let found = digest(values);
        if found != expected {
            wrong.push(format!("{what}: {found:#018x}"));
        }
    };
    let mut y = vec![0f32; 1003];
    apply_gate(&x, &noise(7, 1003), 0.7, ActivationFunction::GeluTanh, &mut y);
    check("gelu", &y, 0x5496_965b_80d6_c5ca);
    apply_gate(&x, &noise(7, 1003), 0.7, ActivationFunction::Silu, &mut y);
    check("silu", &y, 0x6701_ed49_fd70_74cc);
    rms_norm(
        &x,
        Some(&noise(8, 1003)),
        RmsNorm { eps: 1e-6, relative_eps: 1e-5, relative_least: 0.0, floor: 1e-3 },
        &mut y,
    );
    check("norm", &y, 0xcb22_0444_da3b_b742);
    y.copy_from_slice(&x);
    softcap(&mut y, 7.0);
    check("softcap", &y, 0x02e0_4f7b_43db_e5ee);
    // One block of slots, and several chunks.
    for (slots, d, expected) in [(45, 88, 0xf32d_4586_baea_ecc9), (2100, 40, 0x5ac3_e228_8a6c_d3a7)] {
        let s = AttentionShape { heads: 6, kv_heads: 2, tokens: 2, head_dim: d, slots };
        let values: Vec<u16> =
            noise(9, 2 * slots * d).into_iter().map(|v| half::f16::from_f32(v).to_bits()).collect();
        let values = CacheValues::F16(&values);
        let kv = CacheView { values, first: 0, head_stride: slots * d, slot_stride: d };
        let at = HeadStrides { first: 0, head: 2 * d, token: d };
        let mut out = vec![0f32; 6 * 2 * d];
        attention(&Pool::new(1), &s, 0.4, (&noise(10, 6 * 2 * d), at), &kv, &kv, None, (&mut out, at));
        check(&format!("attention over {slots}"), &out, expected);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
