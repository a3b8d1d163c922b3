//! The delegation: for every line of the [op table](super::table), a method that prepares the
//! inputs as the layers' [plan](crate::Plan) says, calls the backend underneath, and wraps the
//! result.

use super::{
    again::again,
    average::average,
    batch::batch,
    batch_norm::batch_norm,
    biased::biased,
    call::Call,
    computed::computed,
    convolution::{forward, weight_backward, x_backward},
    gradient_sum::gradient_sum,
    identity::identity,
    layer_norm::layer_norm,
    rotation::rotation,
    select_assign::{embedding_backward, select_assign},
    softmax::{Role, softmax},
    sum_of_rows::{exact_sum, sum_of_rows},
    table::op_table,
    view::view,
};
use crate::{Layered, on_stream::on_this_stream};
use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorPrimitive,
    ops::*,
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor},
};
use burn_ir::BackendIr;
use core::{future::Future, ops::Range};

/// The type of an argument or a return value of the table on the layered backend.
macro_rules! kind {
    (Float) => { FloatTensor<Self> };
    (Recast) => { FloatTensor<Self> };
    (Int) => { IntTensor<Self> };
    (Bool) => { BoolTensor<Self> };
    (Quantized) => { QuantizedTensor<Self> };
    (Primitive) => { TensorPrimitive<Self> };
    (OptFloat) => { Option<FloatTensor<Self>> };
    (OptBool) => { Option<BoolTensor<Self>> };
    (Floats) => { Vec<FloatTensor<Self>> };
    (Ints) => { Vec<IntTensor<Self>> };
    (Bools) => { Vec<BoolTensor<Self>> };
    (Quantizeds) => { Vec<QuantizedTensor<Self>> };
    (Device) => { &Device<Self> };
    (QParams) => { QuantizationParametersPrimitive<Self> };
    (Flag) => { bool };
    (FloatInt) => { (FloatTensor<Self>, IntTensor<Self>) };
    (IntInt) => { (IntTensor<Self>, IntTensor<Self>) };
    (QuantizedInt) => { (QuantizedTensor<Self>, IntTensor<Self>) };
    (FutureData) => { impl Future<Output = Result<TensorData, ExecutionError>> + Send };
    (FutureFloat) => { impl Future<Output = FloatTensor<Self>> + 'static + Send };
    (FutureInt) => { impl Future<Output = IntTensor<Self>> + 'static + Send };
    (FutureBool) => { impl Future<Output = BoolTensor<Self>> + 'static + Send };
    ([$type:ty]) => { $type };
    // The remaining kinds are the structs that some module ops return.
    ($struct:ident) => { $struct<Self> };
}

/// Shows an argument to the call, so that its plan can be made.
macro_rules! see {
    ($call:ident, Float, $arg:ident) => {
        $call.see_float(&$arg);
    };
    ($call:ident, OptFloat, $arg:ident) => {
        if let Some(tensor) = &$arg {
            $call.see_float(tensor);
        }
    };
    ($call:ident, Floats, $arg:ident) => {
        for tensor in &$arg {
            $call.see_float(tensor);
        }
    };
    ($call:ident, Primitive, $arg:ident) => {
        match &$arg {
            TensorPrimitive::Float(tensor) => $call.see_float(tensor),
            TensorPrimitive::QFloat(tensor) => $call.see_layer(tensor.layer()),
        }
    };
    ($call:ident, Int, $arg:ident) => {
        $call.see_layer($arg.layer());
    };
    ($call:ident, Bool, $arg:ident) => {
        $call.see_layer($arg.layer());
    };
    ($call:ident, Quantized, $arg:ident) => {
        $call.see_layer($arg.layer());
    };
    ($call:ident, Ints, $arg:ident) => {
        for tensor in &$arg {
            $call.see_layer(tensor.layer());
        }
    };
    ($call:ident, Bools, $arg:ident) => {
        for tensor in &$arg {
            $call.see_layer(tensor.layer());
        }
    };
    ($call:ident, Quantizeds, $arg:ident) => {
        for tensor in &$arg {
            $call.see_layer(tensor.layer());
        }
    };
    ($call:ident, Device, $arg:ident) => {
        $call.see_device($arg);
    };
    ($call:ident, [usize], $arg:ident) => {
        $call.see_dims(&[$arg]);
    };
    ($call:ident, [&[usize]], $arg:ident) => {
        $call.see_dims($arg);
    };
    ($call:ident, [Shape], $arg:ident) => {
        $call.see_shape(&$arg);
    };
    ($call:ident, [Scalar], $arg:ident) => {
        $call.constants.see($arg);
    };
    ($call:ident, [PadMode], $arg:ident) => {
        if let PadMode::Constant(number) = $arg {
            $call.constants.see(number.into());
        }
    };
    ($call:ident, [Distribution], $arg:ident) => {
        $call.see_distribution($arg);
    };
    ($call:ident, [FloatDType], $arg:ident) => {
        $call.see_dtype($arg);
    };
    ($call:ident, $other:tt, $arg:ident) => {};
}

/// A constant, fit for the dtype that the op computes in.
macro_rules! fit {
    ($call:ident, [Scalar], $arg:ident) => {
        let $arg = $call.fit($arg);
    };
    ($call:ident, [PadMode], $arg:ident) => {
        let $arg = match $arg {
            PadMode::Constant(number) => PadMode::Constant($call.fit(number.into()).elem()),
            mode => mode,
        };
    };
    ($call:ident, $other:tt, $arg:ident) => {};
}

/// Has the layer run an op that returns a float tensor, if the plan says that it does.
macro_rules! own {
    ($call:ident, Float, $($arg:ident: $kind:tt),*) => {
        if $call.is_own() {
            let mut inputs = Vec::new();
            $(offer!(inputs, $kind, $arg);)*
            if let Some(tensor) = $call.run(inputs) {
                return tensor;
            }
        }
    };
    ($call:ident, $other:ident, $($arg:ident: $kind:tt),*) => {};
}

/// Adds a float argument to the inputs of an op that the layer runs itself.
macro_rules! offer {
    ($inputs:ident, Float, $arg:ident) => {
        $inputs.push($arg.clone());
    };
    ($inputs:ident, OptFloat, $arg:ident) => {
        $inputs.extend($arg.clone());
    };
    ($inputs:ident, Floats, $arg:ident) => {
        $inputs.extend($arg.iter().cloned());
    };
    ($inputs:ident, $other:tt, $arg:ident) => {};
}

/// Turns an argument into the one for the backend underneath.
macro_rules! lower {
    ($call:ident, Float, $arg:ident) => {
        $call.lower($arg)
    };
    ($call:ident, OptFloat, $arg:ident) => {
        $arg.map(|tensor| $call.lower(tensor))
    };
    ($call:ident, Floats, $arg:ident) => {
        $arg.into_iter().map(|tensor| $call.lower(tensor)).collect()
    };
    ($call:ident, Primitive, $arg:ident) => {
        match $arg {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float($call.lower(tensor)),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor.into_storage()),
        }
    };
    ($call:ident, Int, $arg:ident) => {
        $arg.into_storage()
    };
    ($call:ident, Bool, $arg:ident) => {
        $arg.into_storage()
    };
    ($call:ident, Quantized, $arg:ident) => {
        $arg.into_storage()
    };
    ($call:ident, OptBool, $arg:ident) => {
        $arg.map(|tensor| tensor.into_storage())
    };
    ($call:ident, Ints, $arg:ident) => {
        $arg.into_iter()
            .map(|tensor| tensor.into_storage())
            .collect()
    };
    ($call:ident, Bools, $arg:ident) => {
        $arg.into_iter()
            .map(|tensor| tensor.into_storage())
            .collect()
    };
    ($call:ident, Quantizeds, $arg:ident) => {
        $arg.into_iter()
            .map(|tensor| tensor.into_storage())
            .collect()
    };
    ($call:ident, Device, $arg:ident) => {
        $arg.base()
    };
    ($call:ident, QParams, $arg:ident) => {
        QuantizationParametersPrimitive {
            scales: $arg.scales.into_nominal(),
            global: $arg.global.map(|tensor| tensor.into_nominal()),
        }
    };
    ($call:ident, $other:tt, $arg:ident) => {
        $arg
    };
}

/// Wraps the result of the backend underneath.
macro_rules! wrap {
    ($call:ident, Float, $out:expr) => {
        $call.float($out)
    };
    ($call:ident, Recast, $out:expr) => {
        $call.recast($out)
    };
    ($call:ident, Int, $out:expr) => {
        $call.tensor($out)
    };
    ($call:ident, Bool, $out:expr) => {
        $call.mask($out)
    };
    ($call:ident, Quantized, $out:expr) => {
        $call.tensor($out)
    };
    ($call:ident, Primitive, $out:expr) => {
        match $out {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float($call.float(tensor)),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat($call.tensor(tensor)),
        }
    };
    ($call:ident, Flag, $out:expr) => {
        $out
    };
    ($call:ident, FloatInt, $out:expr) => {{
        let (values, indices) = $out;
        ($call.float(values), $call.tensor(indices))
    }};
    ($call:ident, IntInt, $out:expr) => {{
        let (values, indices) = $out;
        ($call.tensor(values), $call.tensor(indices))
    }};
    ($call:ident, QuantizedInt, $out:expr) => {{
        let (values, indices) = $out;
        ($call.tensor(values), $call.tensor(indices))
    }};
    ($call:ident, FutureData, $out:expr) => {
        on_this_stream($out)
    };
    ($call:ident, FutureFloat, $out:expr) => {{
        let future = $out;
        on_this_stream(async move { $call.float(future.await) })
    }};
    ($call:ident, FutureInt, $out:expr) => {{
        let future = $out;
        on_this_stream(async move { $call.tensor(future.await) })
    }};
    ($call:ident, FutureBool, $out:expr) => {{
        let future = $out;
        on_this_stream(async move { $call.tensor(future.await) })
    }};
    ($call:ident, BatchNormTrain, $out:expr) => {{
        let out = $out;
        BatchNormTrain::new(
            $call.float(out.output),
            $call.float(out.mean),
            $call.float(out.variance),
        )
    }};
    ($call:ident, BatchNormTrainBackward, $out:expr) => {{
        let out = $out;
        BatchNormTrainBackward::new(
            $call.float(out.x_grad),
            $call.float(out.gamma_grad),
            $call.float(out.beta_grad),
        )
    }};
    ($call:ident, DeformConv2dBackward, $out:expr) => {{
        let out = $out;
        DeformConv2dBackward::new(
            $call.float(out.x_grad),
            $call.float(out.offset_grad),
            $call.float(out.weight_grad),
            out.mask_grad.map(|grad| $call.float(grad)),
            out.bias_grad.map(|grad| $call.float(grad)),
        )
    }};
    ($call:ident, MaxPool1dWithIndices, $out:expr) => {{
        let out = $out;
        MaxPool1dWithIndices::new($call.float(out.output), $call.tensor(out.indices))
    }};
    ($call:ident, MaxPool2dWithIndices, $out:expr) => {{
        let out = $out;
        MaxPool2dWithIndices::new($call.float(out.output), $call.tensor(out.indices))
    }};
    ($call:ident, MaxPool1dBackward, $out:expr) => {
        MaxPool1dBackward::new($call.float($out.x_grad))
    };
    ($call:ident, MaxPool2dBackward, $out:expr) => {
        MaxPool2dBackward::new($call.float($out.x_grad))
    };
}

macro_rules! delegate {
    ($($trait:ident {
        $($name:ident ( $($arg:ident : $kind:tt),* ) -> $ret:ident;)*
    })*) => {$(
        impl<B: BackendIr> $trait<Self> for Layered<B> {
            $(
                #[allow(unused_mut, clippy::let_and_return, refining_impl_trait)]
                fn $name($($arg: kind!($kind)),*) -> kind!($ret) {
                    let mut call = Call::<B>::new(crate::Op::$name);
                    $(see!(call, $kind, $arg);)*
                    call.plan();
                    $(fit!(call, $kind, $arg);)*
                    batch!(call, $name, $($arg: $kind),*);
                    own!(call, $ret, $($arg: $kind),*);
                    softmax!(call, $name, $($arg: $kind),*);
                    batch_norm!(call, $name, $($arg: $kind),*);
                    layer_norm!(call, $name, $($arg: $kind),*);
                    rotation!(call, $name, $($arg: $kind),*);
                    exact_sum!(call, $name, $($arg: $kind),*);
                    average!(call, $name, $($arg: $kind),*);
                    gradient_sum!(call, $name, $($arg: $kind),*);
                    again!(call, $name, $ret, $($arg: $kind),*);
                    view!(call, $name, $($arg: $kind),*);
                    identity!(call, $ret, $($arg: $kind),*);
                    biased!(call, $name, $($arg: $kind),*);
                    $(let $arg = lower!(call, $kind, $arg);)*
                    call.lowered();
                    wrap!(call, $ret, computed!(call, $name, $($arg),*))
                }
            )*
        }
    )*};
}

op_table!(delegate);
