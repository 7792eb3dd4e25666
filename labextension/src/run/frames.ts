import { Disposables } from './dom';

/**
 * Draw at most once per animation frame, and only while the target is visible.
 *
 * Args:
 *   target: element whose visibility is observed.
 *   draw: callback with the start time of the frame in milliseconds.
 *   appeared: callback before the first frame after the target became visible.
 */
export class Frames {
  private readonly disposables = new Disposables();
  private isVisible = false;
  private isWanted = false;
  private frame = 0;

  constructor(
    target: Element,
    private readonly draw: (now: number) => void,
    private readonly appeared: () => void
  ) {
    const observer = new IntersectionObserver(entries => {
      this.see(entries[entries.length - 1]?.isIntersecting ?? false);
    });
    observer.observe(target);
    this.disposables.add(() => observer.disconnect());
    this.disposables.listen(document, 'visibilitychange', () => this.schedule());
    this.disposables.add(() => cancelAnimationFrame(this.frame));
  }

  /** Draw in the next frame in which the target is visible. */
  request(): void {
    this.isWanted = true;
    this.schedule();
  }

  dispose(): void {
    this.isWanted = false;
    this.disposables.dispose();
  }

  private see(isVisible: boolean): void {
    if (isVisible && !this.isVisible) {
      this.appeared();
    }
    this.isVisible = isVisible;
    this.schedule();
  }

  private schedule(): void {
    if (this.isWanted && this.isVisible && !document.hidden && this.frame === 0) {
      this.frame = requestAnimationFrame(now => this.run(now));
    }
  }

  private run(now: number): void {
    this.frame = 0;
    this.isWanted = false;
    this.draw(now);
  }
}
