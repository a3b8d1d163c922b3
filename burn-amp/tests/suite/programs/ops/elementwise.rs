//! Ops on each element of one tensor.

use super::{Op, table, unary};
use crate::suite::programs::value::{Float, each, like, rejoin};
use burn::tensor::{FloatDType, Tensor, activation};

pub(super) const FUNCTIONS: &[Op] = unary! {
    Exact neg: |x| x.neg();
    Exact abs: |x| x.abs();
    Exact sign: |x| x.sign();
    Exact floor: |x| x.floor();
    Exact round: |x| x.round();
    Exact trunc: |x| x.trunc();
    Exact square: |x| x.square();
    Exact square_by_power: |x| x.powi_scalar(2);
    Exact square_by_product: |x| x.clone() * x;
    Exact cube: |x| x.powi_scalar(3);
    Rounded power: |x| (x.abs() + 0.5).powf_scalar(1.5);
    Rounded inverse_power: |x| (x.abs() + 0.5).powi_scalar(-1);
    Rounded exp: |x| x.clamp(-4.0, 4.0).exp();
    Rounded log: |x| (x.abs() + 0.1).log();
    Rounded log1p: |x| x.abs().log1p();
    Rounded sqrt: |x| (x.abs() + 0.1).sqrt();
    Rounded recip: |x| (x.abs() + 0.5).recip();
    Rounded sin: |x| x.sin();
    Rounded cos: |x| x.cos();
    Rounded tan: |x| x.clamp(-1.0, 1.0).tan();
    Rounded sinh: |x| x.clamp(-3.0, 3.0).sinh();
    Rounded cosh: |x| x.clamp(-3.0, 3.0).cosh();
    Rounded tanh: |x| x.tanh();
    Rounded asin: |x| x.clamp(-0.9, 0.9).asin();
    Rounded acos: |x| x.clamp(-0.9, 0.9).acos();
    Rounded atan: |x| x.atan();
    Rounded asinh: |x| x.asinh();
    Rounded acosh: |x| (x.abs() + 1.1).acosh();
    Rounded atanh: |x| x.clamp(-0.9, 0.9).atanh();
    Rounded erf: |x| x.erf();
};

pub(super) const ACTIVATIONS: &[Op] = unary! {
    Exact relu: |x| activation::relu(x);
    Exact relu6: |x| activation::relu6(x);
    Exact hardtanh: |x| activation::hardtanh(x, -2.0, 2.0);
    Exact threshold: |x| activation::threshold(x, 1.0, 2.0);
    Exact leaky_relu: |x| activation::leaky_relu(x, 0.5);
    Rounded gelu: |x| activation::gelu(x);
    Rounded gelu_approximate: |x| activation::gelu_approximate(x);
    Rounded sigmoid: |x| activation::sigmoid(x);
    Rounded hard_sigmoid: |x| activation::hard_sigmoid(x, 0.2, 0.5);
    Rounded log_sigmoid: |x| activation::log_sigmoid(x);
    Rounded silu: |x| activation::silu(x);
    Rounded hard_swish: |x| activation::hard_swish(x);
    Rounded softplus: |x| activation::softplus(x, 1.5);
    Rounded mish: |x| activation::mish(x);
    Rounded elu: |x| activation::elu(x, 0.7);
    Rounded softsign: |x| activation::softsign(x);
    Rounded gate: |x| activation::sigmoid(x.clone()) * x;
};

pub(super) const WITH_NUMBERS: &[Op] = table! {
    Exact add_scalar: |m, p| {
        let number = m.number(p);
        Some(each!(m.float(p), |x| x + number))
    };
    Exact sub_scalar: |m, p| {
        let number = m.number(p);
        Some(each!(m.float(p), |x| x - number))
    };
    Exact scalar_minus: |m, p| {
        let number = m.number(p);
        Some(each!(m.float(p), |x| -x + number))
    };
    Exact by_one: |m, p| {
        let one = Tensor::<1>::ones([1], &m.device());
        let one = m.fit(one.into());
        let Float::R1(one) = one else {
            return None;
        };
        Some(each!(m.float(p), |x| x * one.unsqueeze()))
    };
    Exact add_zeros: |m, p| {
        let one = m.fit(Tensor::<1>::zeros([1], &m.device()).into());
        let Float::R1(one) = one else {
            return None;
        };
        Some(each!(m.float(p), |x| x + one.unsqueeze()))
    };
    Exact mul_scalar: |m, p| {
        let number = m.number(p);
        Some(each!(m.float(p), |x| x * number))
    };
    Exact div_scalar: |m, p| {
        let number = Some(m.number(p)).filter(|it| it.abs() > 1e-3)?;
        Some(each!(m.float(p), |x| x / number))
    };
    Rounded remainder_scalar: |m, p| {
        let number = Some(m.number(p)).filter(|it| it.abs() > 1e-3)?;
        Some(each!(m.float(p), |x| x % number))
    };
    Exact clamp: |m, p| {
        let [a, b] = [m.number(p), m.number(p)];
        Some(each!(m.float(p), |x| x.clamp(a.min(b), a.max(b))))
    };
    Exact clamp_min: |m, p| {
        let number = m.number(p);
        Some(each!(m.float(p), |x| x.clamp_min(number)))
    };
    Exact clamp_max: |m, p| {
        let number = m.number(p);
        Some(each!(m.float(p), |x| x.clamp_max(number)))
    };
};

pub(super) const MASKS: &[Op] = table! {
    Exact mask_fill: |m, p| {
        let [bound, number] = [m.number(p), m.number(p)];
        Some(each!(m.float(p), |x| {
            let mask = x.clone().greater_scalar(bound);
            x.mask_fill(mask, number)
        }))
    };
    Exact fill_not_positive: |m, p| Some(each!(m.float(p), |x| {
        let mask = x.clone().lower_equal_scalar(0);
        x.mask_fill(mask, 0)
    }));
    Exact mask_of_float: |m, p| {
        let bound = m.number(p);
        Some(each!(m.float(p), |x| {
            let mask = like(x.clone().lower_scalar(bound).float(), &x);
            x * mask
        }))
    };
    Exact mask_alone: |m, p| {
        let bound = m.number(p);
        Some(each!(m.float(p), |x| x.greater_equal_scalar(bound).float()))
    };
    Exact equal_scalar: |m, p| {
        let number = m.number(p);
        Some(each!(m.float(p), |x| x.equal_scalar(number).bool_not().float()))
    };
    Exact is_nan: |m, p| Some(each!(m.float(p), |x| x.is_nan().float()));
    Exact to_int: |m, p| Some(each!(m.float(p), |x| (x.clamp(-9.0, 9.0).int() + 1).float()));
};

/// The tensor in another dtype, and back.
fn through(x: Float, dtype: FloatDType) -> Float {
    each!(x, |x| (x.cast(dtype) * 2).cast(FloatDType::F32))
}

pub(super) const CASTS: &[Op] = table! {
    Exact through_f16: |m, p| Some(through(m.float(p), FloatDType::F16));
    Exact through_bf16: |m, p| Some(through(m.float(p), FloatDType::BF16));
    Exact through_f64: |m, p| Some(through(m.float(p), FloatDType::F64));
    Exact to_f32: |m, p| Some(each!(m.float(p), |x| x.cast(FloatDType::F32)));
    Exact detach: |m, p| Some(each!(m.float(p), |x| x.detach()));
    Exact into_and_out_of_autodiff: |m, p| Some(each!(m.float(p), |x| match x.is_autodiff() {
        true => rejoin(x.clone().inner(), &x),
        false => x,
    }));
};
