//! Watching what ops make.

use super::devices::Leased;
use burn::tensor::{DType, Device, Tensor};
use burn_layer::{Inputs, Layer, Layers, Made, Op, Plan, scoped};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

/// Multiplies in bf16 and writes down what ops made.
#[derive(Clone, Debug, Default)]
struct Watch {
    off: Arc<AtomicBool>,
    #[allow(clippy::type_complexity)]
    made: Arc<Mutex<Vec<(Op, [DType; 2], bool, usize, String)>>>,
    stored: Arc<Mutex<Vec<(DType, DType, usize)>>>,
}

impl Layer for Watch {
    fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
        (op == Op::float_mul).then(|| Plan::compute(DType::BF16).store(DType::F32))
    }

    fn watches(&self) -> bool {
        !self.off.load(Ordering::Relaxed)
    }

    fn made(&self, made: &Made<'_>) {
        let names = made.scopes::<String>().into_iter();
        let names: Vec<_> = names.map(String::as_str).collect();
        self.made.lock().unwrap().push((
            made.op,
            [made.dtype, made.output.dtype()],
            made.output.is_finite().unwrap(),
            made.inputs.len(),
            names.join("."),
        ));
    }

    fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        self.stored.lock().unwrap().push((dtype, nominal, elements));
    }
}

#[test]
fn a_layer_is_shown_what_ops_make_of_what() {
    let watch = Watch::default();
    let device = Layers::on(Device::flex()).layer(watch.clone()).leased();
    let x = Tensor::<1>::from_floats([1.0, 0.0, 3.0], &device);
    let outer = Arc::new(String::from("outer"));
    let inner = Arc::new(String::from("inner"));
    let y = scoped(&outer, || scoped(&inner, || x.clone() * x.clone()));
    y.log().into_data();
    let made: Vec<_> = watch.made.lock().unwrap().drain(..).collect();
    // As computed, and as stored.
    let (f32, bf16) = (DType::F32, DType::BF16);
    assert_eq!(
        made,
        [
            (Op::float_from_data, [f32; 2], true, 0, String::new()),
            (Op::float_mul, [bf16, f32], true, 2, "outer.inner".into()),
            (Op::float_log, [f32; 2], false, 1, String::new()),
        ]
    );
    let stored = watch.stored.lock().unwrap().clone();
    assert_eq!(stored, [(DType::F32, DType::F32, 3); 3]);

    watch.off.store(true, Ordering::Relaxed);
    x.abs().into_data();
    assert!(watch.made.lock().unwrap().is_empty());
}
