import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import uPlot from 'uplot';
import type { IRunCurve, IRunRow } from '../records';
import { smooth } from '../run/smooth';
import { Theme, lineColour, LINE_COLOURS } from '../run/theme';
import { duration, plain } from '../run/words';
import { nameOf } from './columns';
import type { RunsModel } from './model';

/** Largest number of runs in one chart. */
export const MOST_CURVES = 32;

const LEAST_HEIGHT = 120;
const DASH = [6, 4];

interface IOverlayProps {
  readonly model: RunsModel;
  readonly rows: readonly IRunRow[];
  readonly trans: TranslationBundle;
}

/** Settings of the chart. */
interface IScales {
  readonly isTime: boolean;
  readonly isLog: boolean;
  /** Weight of earlier values, in 0..1. */
  readonly smoothing: number;
}

interface ICurve {
  readonly row: IRunRow;
  readonly colour: string;
  readonly isDashed: boolean;
  readonly curve: IRunCurve | null;
}

/** Chart of one metric of several runs, on shared axes. */
export function Overlay({ model, rows, trans }: IOverlayProps): React.JSX.Element {
  const metrics = metricsOf(rows);
  const [chosen, setChosen] = React.useState('loss');
  const [scales, setScales] = React.useState<IScales>({
    isTime: false,
    isLog: false,
    smoothing: 0
  });
  const metric = metrics.includes(chosen) ? chosen : (metrics[0] ?? '');
  const curves = useCurves(model, rows.slice(0, MOST_CURVES), metric);
  return (
    <section className="nbdist-run nbdist-Overlay" aria-label={trans.__('Comparison of runs')}>
      <OverlayBar
        {...{ metrics, metric, scales, trans }}
        onMetric={setChosen}
        onScales={change => setScales({ ...scales, ...change })}
      />
      <OverlayChart {...{ curves, metric, scales, trans }} />
    </section>
  );
}

interface IBarProps {
  readonly metrics: readonly string[];
  readonly metric: string;
  readonly scales: IScales;
  readonly trans: TranslationBundle;
  readonly onMetric: (metric: string) => void;
  readonly onScales: (change: Partial<IScales>) => void;
}

function OverlayBar(props: IBarProps): React.JSX.Element {
  const { metrics, metric, scales, trans, onMetric, onScales } = props;
  return (
    <div className="nbdist-OverlayBar">
      <label>
        {trans.__('Metric')}
        <select value={metric} onChange={event => onMetric(event.target.value)}>
          {metrics.map(name => (
            <option key={name}>{name}</option>
          ))}
        </select>
      </label>
      <label>
        {trans.__('Axis')}
        <select
          value={scales.isTime ? 'time' : 'step'}
          onChange={event => onScales({ isTime: event.target.value === 'time' })}
        >
          <option value="step">{trans.__('Step')}</option>
          <option value="time">{trans.__('Time')}</option>
        </select>
      </label>
      <label>
        {trans.__('Smoothing')}
        <input
          type="range"
          min={0}
          max={0.99}
          step={0.01}
          value={scales.smoothing}
          onChange={event => onScales({ smoothing: Number(event.target.value) })}
        />
        <span>{scales.smoothing.toFixed(2)}</span>
      </label>
      <label>
        <input
          type="checkbox"
          checked={scales.isLog}
          onChange={event => onScales({ isLog: event.target.checked })}
        />
        {trans.__('Log scale')}
      </label>
    </div>
  );
}

interface IChartProps {
  readonly curves: readonly ICurve[];
  readonly metric: string;
  readonly scales: IScales;
  readonly trans: TranslationBundle;
}

function OverlayChart({ curves, metric, scales, trans }: IChartProps): React.JSX.Element {
  const host = React.useRef<HTMLDivElement>(null);
  const [cursor, setCursor] = React.useState<number | null>(null);
  const data = React.useMemo(() => dataOf(curves, scales), [curves, scales]);
  React.useEffect(() => {
    const drawn = host.current === null ? null : new Lines(host.current, curves, data, scales);
    drawn?.onCursor(setCursor);
    return () => drawn?.dispose();
  }, [data]);
  const label = trans._n(
    'Chart of %2 for %1 run',
    'Chart of %2 for %1 runs',
    curves.length,
    metric
  );
  return (
    <div className="nbdist-OverlayChart">
      <div ref={host} className="nbdist-OverlayPlot" role="img" aria-label={label} dir="ltr" />
      <OverlayLegend {...{ curves, data, cursor, scales, trans }} />
    </div>
  );
}

interface ILegendProps extends Pick<IChartProps, 'curves' | 'scales' | 'trans'> {
  readonly data: uPlot.AlignedData;
  /** Index of the place under the pointer. Null without a pointer. */
  readonly cursor: number | null;
}

/** Name and value of each curve: at the pointer, else the last one. */
function OverlayLegend(props: ILegendProps): React.JSX.Element {
  const { curves, data, cursor, scales, trans } = props;
  const x = cursor === null ? null : (data[0][cursor] ?? null);
  const place =
    x === null
      ? trans.__('Last values')
      : scales.isTime
        ? duration(x)
        : trans.__('Step %1', plain(x));
  return (
    <div className="nbdist-OverlayLegend" tabIndex={0} role="group" aria-label={place}>
      <p>{place}</p>
      <ul>
        {curves.map(({ row, colour, isDashed, curve }, i) => {
          const value = curve === null ? NaN : valueAt(data[i + 1]!, cursor);
          return (
            <li key={row.state.id}>
              <span
                className="nbdist-OverlayMark"
                style={{ borderBlockStartColor: colour }}
                data-dashed={isDashed}
              />
              <span title={nameOf(row, trans)}>{nameOf(row, trans)}</span>
              <span>{curve === null ? '' : plain(value)}</span>
            </li>
          );
        })}
      </ul>
    </div>
  );
}

/** Lines in a canvas. They follow the theme and the size of their element. */
class Lines {
  constructor(
    private readonly host: HTMLElement,
    private readonly curves: readonly ICurve[],
    data: uPlot.AlignedData,
    private readonly scales: IScales
  ) {
    this.theme = new Theme(host);
    this.plot = new uPlot(this.options(), data, host);
    this.theme.onChange(() => this.plot.redraw());
    this.observer = new ResizeObserver(() => this.plot.setSize(this.size()));
    this.observer.observe(host);
  }

  onCursor(listener: (place: number | null) => void): void {
    this.listener = listener;
  }

  dispose(): void {
    this.observer.disconnect();
    this.theme.dispose();
    this.plot.destroy();
  }

  private size(): { width: number; height: number } {
    const { clientWidth, clientHeight } = this.host;
    return { width: Math.max(1, clientWidth), height: Math.max(LEAST_HEIGHT, clientHeight) };
  }

  private options(): uPlot.Options {
    const { isTime, isLog } = this.scales;
    const axis: uPlot.Axis = {
      stroke: () => this.theme.colours.faint,
      font: this.theme.colours.font,
      grid: { stroke: () => this.theme.colours.grid, width: 1 },
      ticks: { show: false }
    };
    const time = (_: uPlot, splits: number[]): string[] => splits.map(duration);
    return {
      ...this.size(),
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 28, ...(isTime && { values: time, space: 80 }) },
        { ...axis, size: 64 }
      ],
      series: [{}, ...this.curves.map(curve => line(curve))],
      hooks: { setCursor: [({ cursor }) => this.listener(cursor.idx ?? null)] }
    };
  }

  private listener: (place: number | null) => void = () => undefined;
  private readonly theme: Theme;
  private readonly plot: uPlot;
  private readonly observer: ResizeObserver;
}

function line({ colour, isDashed }: ICurve): uPlot.Series {
  const points = { show: false };
  return { stroke: colour, width: 1.75, spanGaps: true, points, ...(isDashed && { dash: DASH }) };
}

/** Curve of a run with as many reports as its row. Null if the run did not report the metric. */
interface IFetched {
  readonly version: string;
  readonly curve: IRunCurve | null;
}

/** Fetch the curves of runs, again when a run has reported further steps. */
function useCurves(model: RunsModel, rows: readonly IRunRow[], metric: string): readonly ICurve[] {
  const [fetched, setFetched] = React.useState<ReadonlyMap<string, IFetched>>(new Map());
  const versions = rows.map(row => `${row.state.id} ${versionOf(row, metric)}`).join();
  React.useEffect(() => {
    let isCurrent = true;
    const fetch = async (row: IRunRow): Promise<readonly [string, IFetched]> => {
      const { id } = row.state;
      const version = versionOf(row, metric);
      const known = fetched.get(id);
      if (known?.version === version) {
        return [id, known];
      }
      const curve = metric in row.metrics ? await model.curve(id, metric) : null;
      return [id, { version, curve }];
    };
    void Promise.allSettled(rows.map(fetch)).then(results => {
      if (isCurrent) {
        setFetched(
          new Map(results.flatMap(one => (one.status === 'fulfilled' ? [one.value] : [])))
        );
      }
    });
    return () => {
      isCurrent = false;
    };
  }, [versions]);
  return React.useMemo(
    () =>
      rows.map((row, i) => ({
        row,
        colour: lineColour(i),
        isDashed: i >= LINE_COLOURS.length,
        curve: fetched.get(row.state.id)?.curve ?? null
      })),
    [fetched, versions]
  );
}

function versionOf({ state, step }: IRunRow, metric: string): string {
  return `${metric} ${step} ${state.status}`;
}

/** Return places and smoothed values, as uPlot expects them. */
function dataOf(
  curves: readonly ICurve[],
  { isTime, isLog, smoothing }: IScales
): uPlot.AlignedData {
  const tables = curves.map(({ curve }): uPlot.AlignedData => {
    if (curve === null) {
      return [[], []];
    }
    const values = smoothed(curve.y, smoothing);
    const y = isLog ? values.map(value => (value !== null && value > 0 ? value : null)) : values;
    return [[...(isTime ? curve.seconds : curve.x)], y];
  });
  return tables.length === 0 ? [[]] : uPlot.join(tables);
}

function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight === 0) {
    return [...values];
  }
  const mean = Float32Array.from(values, value => value ?? 0);
  const n = Uint32Array.from(values, value => Number(value !== null));
  const out = new Float32Array(mean.length);
  const bad = new Uint8Array(mean.length);
  smooth({ min: mean, max: mean, mean, n, bad, length: mean.length }, weight, out);
  return [...out].map((value, i) => (n[i] === 0 ? null : value));
}

/** Return the value at a place, or the last one. NaN without values. */
function valueAt(values: uPlot.AlignedData[number], place: number | null): number {
  const end = place === null ? values.length - 1 : place;
  for (let i = end; i >= 0; i--) {
    const value = values[i];
    if (value !== null && value !== undefined) {
      return value;
    }
  }
  return NaN;
}

function metricsOf(rows: readonly IRunRow[]): readonly string[] {
  return [...new Set(rows.flatMap(row => Object.keys(row.metrics)))];
}
