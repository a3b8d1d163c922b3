//! The ops of a backend that submits descriptions of ops.

/// The methods of [`Fp8Ops`](crate::Fp8Ops) for a backend whose float and int tensors have a `client` and `into_ir`. `$submit`
/// takes the client and a description, and returns the outputs.
macro_rules! lazy_ops {
    ($submit:expr) => {
        fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
            let client = input.client.clone();
            let [amax] = $submit(&client, custom::amax(input.into_ir()));
            amax
        }

        fn fp8_scales(
            amax: FloatTensor<Self>,
            format: Fp8Format,
            power_of_two: bool,
        ) -> FloatTensor<Self> {
            let client = amax.client.clone();
            let op = custom::scales(amax.into_ir(), format, power_of_two);
            let [scales] = $submit(&client, op);
            scales
        }

        fn fp8_quantize(
            input: FloatTensor<Self>,
            scale: FloatTensor<Self>,
            format: Fp8Format,
        ) -> (IntTensor<Self>, FloatTensor<Self>) {
            let client = input.client.clone();
            let op = custom::quantize(input.into_ir(), scale.into_ir(), format);
            let [codes, amax] = $submit(&client, op);
            (codes, amax)
        }

        fn fp8_quantize_transposed(
            input: FloatTensor<Self>,
            scale: FloatTensor<Self>,
            format: Fp8Format,
        ) -> (IntTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
            let client = input.client.clone();
            let op = custom::quantize_transposed(input.into_ir(), scale.into_ir(), format);
            let [codes, transposed, amax] = $submit(&client, op);
            (codes, transposed, amax)
        }

        fn fp8_dequantize(
            codes: IntTensor<Self>,
            scale: FloatTensor<Self>,
            granularity: Granularity,
            format: Fp8Format,
            dtype: FloatDType,
        ) -> FloatTensor<Self> {
            let client = codes.client.clone();
            let (codes, scale) = (codes.into_ir(), scale.into_ir());
            let op = custom::dequantize(codes, scale, granularity, format, dtype);
            let [values] = $submit(&client, op);
            values
        }

        fn fp8_matmul(
            lhs: IntTensor<Self>,
            rhs: IntTensor<Self>,
            lhs_scale: FloatTensor<Self>,
            rhs_scale: FloatTensor<Self>,
            bias: Bias<Self>,
            spec: MatmulSpec,
        ) -> FloatTensor<Self> {
            let client = lhs.client.clone();
            let sides = [lhs.into_ir(), rhs.into_ir()];
            let scales = [lhs_scale.into_ir(), rhs_scale.into_ir()];
            let bias = bias.row().map(|bias| bias.into_ir());
            let op = custom::matmul(sides, scales, bias, spec, false);
            let [product] = $submit(&client, op);
            product
        }

        fn fp8_matmul_amax(
            lhs: IntTensor<Self>,
            rhs: IntTensor<Self>,
            lhs_scale: FloatTensor<Self>,
            rhs_scale: FloatTensor<Self>,
            bias: Bias<Self>,
            spec: MatmulSpec,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let client = lhs.client.clone();
            let sides = [lhs.into_ir(), rhs.into_ir()];
            let scales = [lhs_scale.into_ir(), rhs_scale.into_ir()];
            let bias = bias.row().map(|bias| bias.into_ir());
            let op = custom::matmul(sides, scales, bias, spec, true);
            let [product, amax] = $submit(&client, op);
            (product, amax)
        }

        fn fp8_update_scale(
            history: FloatTensor<Self>,
            scale: FloatTensor<Self>,
            amax: FloatTensor<Self>,
            update: ScaleUpdate,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let client = history.client.clone();
            let [history, scale, amax] = [history, scale, amax].map(|tensor| tensor.into_ir());
            let op = custom::update_scale(history, scale, amax, update);
            let [history, scale] = $submit(&client, op);
            (history, scale)
        }

        fn fp8_quantize_blocks(
            input: FloatTensor<Self>,
            cast: Fp8Cast,
        ) -> (IntTensor<Self>, FloatTensor<Self>) {
            let client = input.client.clone();
            let op = custom::quantize_blocks(input.into_ir(), cast);
            let [codes, scale] = $submit(&client, op);
            (codes, scale)
        }
    };
}

pub(crate) use lazy_ops;
